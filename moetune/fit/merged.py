"""A measured profile with a reference of the same device for what was not measured.

Measured points count where they cover. The reference's, for all else, are multiplied by what the
machine takes of the reference's time over the points that both have (their median ratio): of a
collective over that group, else of all its groups, else of all collectives; of GEMMs over those of
the dtype. Without such points they stay as they are, as does the rule for more ranks.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from moetune.domain.cluster import Machine
from moetune.domain.cost_keys import CollectiveKey, GemmKey
from moetune.domain.errors import InputError
from moetune.domain.profile import Profile
from moetune.domain.reference import CollectiveTable, GemmTable, Table
from moetune.fit.costs import costs_of
from moetune.fit.index import ProfileIndex
from moetune.fit.pool import Series, pool

_LEAST_SPREAD, _SPREAD_OF_FEW = 0.05, 0.10
"""Of a scaled reference: assumed at least, and of fewer than three common points."""
_FEW = 3
_NOWHERE = (math.inf, -math.inf)
Ratios = dict[tuple[str, ...], list[float]]
"""Measured over reference at each common point, by ("gemm", dtype), ("comm", op, group), …"""


def check_base(base: Profile, machine: Machine) -> None:
    """Raise InputError unless the base is of the machine's kind of device, in nodes as large."""
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
            "name a profile of nodes as large as this one's",
        )


def merged(measured: Profile, base: Profile) -> Profile:
    """Return the measured profile with the base's tables, lines and rule for the rest.

    The machine keeps the ranks that measured, and has the base's nodes. A base's own samples count
    as tables; of its other operations the published lines are taken where nothing was measured.

    Args:
        base: of the same kind of device (`check_base`); measured or published.

    Raises:
        InputError: the base is of another device, or of smaller nodes.
    """
    check_base(base, measured.machine)
    tables = _tables_of(base)
    ratios = _ratios(measured, replace(base, tables=tables, samples=()))
    index = ProfileIndex(measured)
    return replace(
        measured,
        machine=replace(measured.machine, devices_per_node=base.machine.devices_per_node),
        citation=f"{base.name} for the rest",
        tables=tuple(_scaled(table, base.name, ratios) for table in tables),
        network=base.network,
        rows=(*measured.rows, *(one for one in base.rows if index.basis(one.key) is None)),
        copy=(*measured.copy, *(one for one in base.copy if index.basis(one.key) is None)),
    )


def _tables_of(base: Profile) -> tuple[Table, ...]:
    """Return the base's tables; what its own samples know comes first, and so counts."""
    own = pool(base.samples)
    words = f"samples of {base.name}"
    tables: list[Table] = []
    for gemm, series in own.of(GemmKey).items():
        points = [(size, gemm.d_in, gemm.d_out, seconds) for size, seconds in _points(series)]
        tables.append(
            GemmTable(
                label="measured", source=words, dtype=gemm.dtype, product=gemm.product,
                num_experts=gemm.num_experts, points=tuple(points),
            )
        )  # fmt: skip
    for key, series in own.of(CollectiveKey).items():
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
    """Return measured over reference at every point that both have."""
    index, costs = ProfileIndex(base), costs_of(base)
    found: Ratios = defaultdict(list)
    for key, series in pool(measured.samples).series.items():
        if not isinstance(key, GemmKey | CollectiveKey):
            continue
        low, high = _covered(key, index)
        for size, seconds in _points(series):
            if low <= size <= high:
                for name in _names_of(key):
                    found[name].append(seconds / costs.seconds(key, size).seconds)
    return found


def _covered(key: GemmKey | CollectiveKey, index: ProfileIndex) -> tuple[float, float]:
    """Return the sizes at which the reference knows an operation: of a GEMM by shapes around it."""
    if isinstance(key, CollectiveKey):
        known = index.pool.series.get(key)
        return (known.sizes[0], known.sizes[-1]) if known else _NOWHERE
    if (key.dtype, key.product) not in index.gemm_forms:
        return _NOWHERE
    surface = index.surface(key.dtype, key.product)
    return _NOWHERE if surface.octaves_outside(key.shape) else surface.rows_range


def _names_of(key: GemmKey | CollectiveKey) -> tuple[tuple[str, ...], ...]:
    if isinstance(key, GemmKey):
        return (("gemm", key.dtype),)
    return _keys_of(key.op, key.group_size, key.num_nodes)


def _keys_of(op: str, size: int, nodes: int) -> tuple[tuple[str, ...], ...]:
    """Return a collective's keys among the ratios, the nearest one first."""
    return ("comm", op, f"{size}/{nodes}"), ("comm", op), ("comm",)


def _scaled(table: Table, base: str, ratios: Ratios) -> Table:
    """Return the base's table as this machine would have it."""
    if isinstance(table, GemmTable):
        keys: tuple[tuple[str, ...], ...] = (("gemm", table.dtype),)
    elif isinstance(table, CollectiveTable):
        keys = _keys_of(table.op, table.group_size, table.num_nodes)
    else:
        keys = ()
    common = next((ratios[key] for key in keys if ratios.get(key)), [])
    if not common:
        return replace(table, source=f"{base}: {table.source}")
    ratio = statistics.median(common)
    logs = [math.log(one) for one in common]
    own = statistics.pstdev(logs) if len(logs) >= _FEW else _SPREAD_OF_FEW
    return replace(
        table,
        label="modelled",
        source=f"{base} × {ratio:.3g}, over {len(common)} common points: {table.source}",
        spread=min(max(own, table.spread, _LEAST_SPREAD), 1.0),
        points=tuple((*sizes, seconds * ratio) for *sizes, seconds in table.points),
    )
