"""A reference machine's times, used for another machine with fewer measurements.

A described machine (`scaled_base`, `without_foreign`) may have faster parts, other nodes and lines
of its file. Values in the file always count. The reference's times stay only where they hold on the
machine: for groups inside a node, and between nodes if both machines have equal nodes and network
cards. The rule for more ranks (`fit.collectives`) predicts the other groups.

A measured machine (`merged`) uses its points where they cover a size. Elsewhere it takes the
reference's times, multiplied by the median of measured over reference time at common points. The
common points of a collective are those of its group, else of all its groups, else of all
collectives; those of a GEMM are of its dtype. Without any, times stay.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import mul
from types import MappingProxyType

from moetune.domain.cluster import HOST_MEMORY, NUM_NICS, NVLINK_PEERS, Group, Machine, nodes_of
from moetune.domain.cost_keys import CollectiveKey, GemmKey
from moetune.domain.errors import InputError
from moetune.domain.profile import Profile, changed_line
from moetune.domain.reference import CollectiveTable, GemmTable, Table
from moetune.domain.samples import LAUNCHES
from moetune.domain.site import site_of
from moetune.domain.units import parse_flops, parse_rate
from moetune.fit.costs import costs_of
from moetune.fit.index import ProfileIndex
from moetune.fit.pool import Series, pool

_GEMM_SPREAD, _LINK_SPREAD = 0.2, 0.3
"""Spread of times scaled by data sheets: root mean square error when each published reference is
predicted from each other reference (docs/decisions/machines.md#0094)."""
_SLOWEST, _FASTEST = 1e-3, 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """A peak of a data sheet on the described machine and on its base, both with units."""

    here: str
    base: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseScaling:
    """The table `[scaled]` of a profile file: peaks, with units, that scale the base's times.

    Args:
        computation: rate of GEMMs, "989TFLOP/s".
        links: bandwidth of a GPU to the other GPUs of its node, one way, "450GB/s".
        memory: bandwidth of a GPU's memory, "3.35TB/s"; scales memory-bound operations.
        host: bandwidth between a GPU and the host, one way, "63GB/s"; scales copies.
    """

    computation: Peaks | None = None
    links: Peaks | None = None
    memory: Peaks | None = None
    host: Peaks | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            if not _SLOWEST <= self.factor(item.name) <= _FASTEST:
                raise InputError("peaks must be within a factor of 1000 of the base's")

    def factor(self, part: str) -> float:
        """Return the factor on the base's times of a machine part, start-up excluded."""
        peaks: Peaks | None = getattr(self, part)
        parse = parse_flops if part == "computation" else parse_rate
        return parse(peaks.base) / parse(peaks.here) if peaks else 1.0


def scaled_base(base: Profile, scaled: BaseScaling) -> Profile:
    """Return the reference scaled to another GPU's peaks; each table keeps its start-up time.

    Equal peaks leave the times unchanged but still widen their range.
    """

    def scale_table(table: Table) -> Table:
        if isinstance(table, GemmTable):
            if scaled.computation is None:
                return table
            return _scaled_table(table, base, scaled.factor("computation"), _GEMM_SPREAD)
        if scaled.links and _is_inside((table.group_size, table.num_nodes), base.machine):
            return _scaled_table(table, base, scaled.factor("links"), _LINK_SPREAD)
        return table

    slower = {part.name: partial(mul, scaled.factor(part.name)) for part in fields(scaled)}
    links = [
        changed_line(line, rate=slower["links"])
        if _is_inside(line.key.group, base.machine)
        else line
        for line in base.collective
    ]
    rows = [
        line if line.op in LAUNCHES else changed_line(line, rate=slower["memory"])
        for line in base.rows
    ]
    return replace(
        base,
        gemm=tuple(changed_line(line, rate=slower["computation"]) for line in base.gemm),
        collective=tuple(links), tables=tuple(map(scale_table, base.tables)), rows=tuple(rows),
        copy=tuple(changed_line(line, rate=slower["host"]) for line in base.copy),
    )  # fmt: skip


def _scaled_table(table: Table, base: Profile, factor: float, spread: float) -> Table:
    startup = min(seconds for *_, seconds in table.points)
    return replace(
        table,
        label="modelled",
        source=f"{base.name} × {factor:.3g} by data sheets: {table.source}",
        spread=max(table.spread, spread),
        points=tuple(
            (*sizes, startup + (seconds - startup) * factor) for *sizes, seconds in table.points
        ),
    )


def without_foreign(
    profile: Profile,
    base: Profile,
    *,
    stated: Collection[str],
    facts: Mapping[str, str] = MappingProxyType({}),
) -> Profile:
    """Return the profile without the base's times and facts that do not hold on its machine.

    No times remain of formats that the devices cannot multiply, or of dispatchers without NVLink
    (`Site`).

    Args:
        profile: the base, overridden by the keys of the file.
        stated: keys of the file; all their values count.
        facts: hardware facts of the file.
    """
    profile = _with_facts(profile, base, facts)
    site = site_of(profile)
    gemm_dtypes = {line.dtype for line in profile.gemm} if "gemm" in stated else set()
    lines = profile.collective if "collective" in stated else ()
    groups = {(line.op, line.group_size, line.num_nodes) for line in lines}

    def holds(table: Table) -> bool:
        if isinstance(table, GemmTable):
            return table.dtype not in gemm_dtypes and site.multiplies(table.dtype) is not False
        if table.kind == "dispatcher" and not site.nvlink_peers:
            return False
        group = (table.group_size, table.num_nodes)
        is_stated = table.kind == "collective" and (table.op, *group) in groups
        return not is_stated and _holds(group, profile, base)

    if "tables" not in stated:
        profile = replace(profile, tables=tuple(filter(holds, profile.tables)))
    if "collective" not in stated:
        of_both = (line for line in profile.collective if _holds(line.key.group, profile, base))
        profile = replace(profile, collective=tuple(of_both))
    return profile


def _with_facts(profile: Profile, base: Profile, facts: Mapping[str, str]) -> Profile:
    """Return the profile with its hardware facts, plus those of the base that also hold for it."""
    here, there = profile.machine, base.machine
    hardware = dict(base.fingerprint.hardware) if here.device == there.device else {}
    is_node = here.devices_per_node == there.devices_per_node
    is_host = site_of(profile).devices_per_node == site_of(base).devices_per_node
    for name, holds in (
        (NUM_NICS, is_node and _nic_rate(profile) == _nic_rate(base)),
        (NVLINK_PEERS, is_node),
        (HOST_MEMORY, is_host),
    ):
        if not holds:
            hardware.pop(name, None)
    fingerprint = replace(profile.fingerprint, hardware={**hardware, **facts})
    return replace(profile, fingerprint=fingerprint)


def _holds(group: Group, profile: Profile, base: Profile) -> bool:
    """Return whether the base's times of a group also hold on the machine."""
    here, there = profile.machine, base.machine
    if _is_inside(group, here) and _is_inside(group, there):
        return True
    return (
        here.devices_per_node == there.devices_per_node
        and not _is_inside(group, here)
        and _nic_rate(profile) == _nic_rate(base)
    )


def _is_inside(group: Group, machine: Machine) -> bool:
    return nodes_of(group, machine) == 1


def _nic_rate(profile: Profile) -> float | None:
    return profile.network.nic_bytes_per_second if profile.network else None


_LEAST_SPREAD, _SPREAD_OF_FEW = 0.05, 0.10
"""Spread of a scaled reference: the minimum, and the value for fewer than three common points."""
_FEW = 3
_NOWHERE = (math.inf, -math.inf)
Ratios = dict[tuple[str, ...], list[float]]
"""Measured over reference times at each common point, by ("gemm", dtype), ("comm", op, group), …"""


def check_base(base: Profile, machine: Machine) -> None:
    """Raise InputError unless the base has the machine's device, and nodes at least as large."""
    here, there = machine, base.machine
    if (here.kind, here.device) != (there.kind, there.device):
        raise InputError(
            f"base {base.name!r} is of {there.kind} {there.device}, and this machine has "
            f"{here.kind} {here.device}",
            "name a profile of the same device, or measure without --base",
        )
    if here.devices_per_node > there.devices_per_node:
        raise InputError(
            f"base {base.name!r} has {there.devices_per_node} devices in a node, and this machine "
            f"{here.devices_per_node}",
            "name a profile of nodes as large as this machine's",
        )


def merged(measured: Profile, base: Profile) -> Profile:
    """Return the measured profile, with the base's tables, lines and rule where it lacks times.

    The machine keeps the ranks that measured, and takes the base's node size. The base's samples
    count as tables. Published lines of the base serve the operations that were not measured.

    Args:
        base: of the same kind of device (`check_base`); measured or published.

    Raises:
        InputError: the base is of another device, or of smaller nodes.
    """
    check_base(base, measured.machine)
    tables = _tables_of(base)
    ratios = _ratios(measured, replace(base, tables=tables, samples=()))
    index = ProfileIndex(profile=measured)
    return replace(
        measured,
        machine=replace(measured.machine, devices_per_node=base.machine.devices_per_node),
        citation=f"{base.name} for the rest",
        tables=tuple(_by_ratio(table, base.name, ratios) for table in tables),
        network=base.network,
        rows=(*measured.rows, *(line for line in base.rows if index.basis(line.key) is None)),
        copy=(*measured.copy, *(line for line in base.copy if index.basis(line.key) is None)),
    )


def _tables_of(base: Profile) -> tuple[Table, ...]:
    """Return the base's tables; tables of its samples come first and therefore take precedence."""
    samples, words = pool(base.samples), f"samples of {base.name}"
    tables: list[Table] = []
    for gemm, series in samples.of(GemmKey).items():
        if gemm.kernel:
            continue  # other machines may lack it
        points = [(size, gemm.d_in, gemm.d_out, seconds) for size, seconds in _points(series)]
        tables.append(
            GemmTable(
                label="measured", source=words, dtype=gemm.dtype, product=gemm.product,
                num_experts=gemm.num_experts, points=tuple(points),
            )
        )  # fmt: skip
    for key, series in samples.of(CollectiveKey).items():
        if key.in_flight == 1:
            tables.append(
                CollectiveTable(
                    label="measured", source=words, op=key.op, group_size=key.group_size,
                    num_nodes=key.num_nodes, points=tuple(_points(series)),
                )
            )  # fmt: skip
    return (*tables, *base.tables)


def _points(series: Series) -> Iterator[tuple[float, float]]:
    return zip(series.sizes, series.medians, strict=True)


def _ratios(measured: Profile, base: Profile) -> Ratios:
    """Return measured over reference time at every point that both machines have."""
    index, costs = ProfileIndex(profile=base), costs_of(base)
    ratios: Ratios = defaultdict(list)
    for key, series in pool(measured.samples).series.items():
        if not isinstance(key, GemmKey | CollectiveKey):
            continue
        low, high = _covered_sizes(key, index)
        for size, seconds in _points(series):
            if low <= size <= high:
                for name in _names_of(key):
                    ratios[name].append(seconds / costs.seconds(key, size).seconds)
    return ratios


def _covered_sizes(key: GemmKey | CollectiveKey, index: ProfileIndex) -> tuple[float, float]:
    """Return the range of sizes that the reference covers; a GEMM needs shapes around it."""
    if isinstance(key, CollectiveKey):
        series = index.pool.series.get(key)
        return (series.sizes[0], series.sizes[-1]) if series else _NOWHERE
    if (key.dtype, key.product, key.kernel) not in index.gemm_forms:
        return _NOWHERE
    surface = index.surface(key.dtype, key.product, key.kernel)
    return _NOWHERE if surface.octaves_outside(key.shape) else surface.rows_range


def _names_of(operation: GemmKey | CollectiveKey | Table) -> tuple[tuple[str, ...], ...]:
    """Return the names under which an operation's ratios are stored, the most specific first."""
    match operation:
        case GemmKey() | GemmTable():
            return (("gemm", operation.dtype),)
        case CollectiveKey() | CollectiveTable():
            group = f"{operation.group_size}/{operation.num_nodes}"
            return ("comm", operation.op, group), ("comm", operation.op), ("comm",)
        case _:
            return ()


def _by_ratio(table: Table, base: str, ratios: Ratios) -> Table:
    """Return the base's table scaled to this machine by the median ratio of common points."""
    common = next((ratios[name] for name in _names_of(table) if ratios.get(name)), [])
    if not common:
        return replace(table, source=f"{base}: {table.source}")
    ratio = statistics.median(common)
    logs = list(map(math.log, common))
    spread = statistics.pstdev(logs) if len(logs) >= _FEW else _SPREAD_OF_FEW
    return replace(
        table,
        label="modelled",
        source=f"{base} × {ratio:.3g}, over {len(common)} common points: {table.source}",
        spread=min(max(spread, table.spread, _LEAST_SPREAD), 1.0),
        points=tuple((*sizes, seconds * ratio) for *sizes, seconds in table.points),
    )
