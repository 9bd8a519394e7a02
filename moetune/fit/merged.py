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
from moetune.domain.costs import Costs
from moetune.domain.errors import InputError
from moetune.domain.profile import Profile
from moetune.domain.reference import CollectiveTable, GemmTable, Table
from moetune.fit.costs import costs_of
from moetune.fit.index import ProfileIndex
from moetune.fit.pool import GemmKey, Series, pool

_LEAST_SPREAD, _SPREAD_OF_FEW = 0.05, 0.10
"""Of a scaled reference: assumed at least, and of fewer than three common points."""
_FEW = 3
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
    rows = {(line.op, line.dtype) for line in measured.rows} | set(index.pool.rows)
    copies = set(index.copies())
    return replace(
        measured,
        machine=replace(measured.machine, devices_per_node=base.machine.devices_per_node),
        citation=f"{base.name} for the rest",
        tables=tuple(_scaled(table, base.name, ratios) for table in tables),
        network=base.network,
        rows=(*measured.rows, *(one for one in base.rows if (one.op, one.dtype) not in rows)),
        copy=(
            *measured.copy,
            *(one for one in base.copy if (one.direction, one.pinned, one.both_ways) not in copies),
        ),
    )


def _tables_of(base: Profile) -> tuple[Table, ...]:
    """Return the base's tables; what its own samples know comes first, and so counts."""
    own = pool(base.samples)
    words = f"samples of {base.name}"
    tables: list[Table] = []
    for (dtype, product, (num_experts, d_in, d_out)), series in own.gemm.items():
        points = [(size, d_in, d_out, seconds) for size, seconds in _points(series)]
        tables.append(
            GemmTable(
                label="measured", source=words, dtype=dtype, product=product,
                num_experts=num_experts, points=tuple(points),
            )
        )  # fmt: skip
    for (op, size, nodes, in_flight), series in own.collective.items():
        if in_flight == 1:
            tables.append(
                CollectiveTable(
                    label="measured", source=words, op=op, group_size=size, num_nodes=nodes,
                    points=tuple(_points(series)),
                )
            )  # fmt: skip
    return (*tables, *base.tables)


def _points(series: Series) -> Iterator[tuple[float, float]]:
    return zip(series.sizes, series.medians, strict=True)


def _ratios(measured: Profile, base: Profile) -> Ratios:
    """Return measured over reference at every point that both have."""
    index, costs, own = ProfileIndex(base), costs_of(base), pool(measured.samples)
    found: Ratios = defaultdict(list)
    for key, series in own.gemm.items():
        found["gemm", key[0]] += _gemm_ratios(key, series, index, costs)
    for (op, size, nodes, in_flight), series in own.collective.items():
        known = index.pool.collective.get((op, size, nodes, in_flight))
        if known is None:
            continue
        for num_bytes, seconds in _points(series):
            if known.sizes[0] <= num_bytes <= known.sizes[-1]:
                reference = costs.collective(
                    op=op, group_size=size, num_nodes=nodes, num_bytes=num_bytes
                )
                for name in _keys_of(op, size, nodes):
                    found[name].append(seconds / reference.seconds)
    return found


def _gemm_ratios(
    key: GemmKey, series: Series, index: ProfileIndex, costs: Costs
) -> Iterator[float]:
    """Yield a shape's ratios, where it lies among the reference's shapes and rows."""
    dtype, product, (num_experts, d_in, d_out) = key
    if (dtype, product) not in index.gemm_forms:
        return
    surface = index.surface(dtype, product)
    low, high = surface.rows_range
    if surface.octaves_outside((num_experts, d_in, d_out)):
        return
    for rows, seconds in _points(series):
        if low <= rows <= high:
            reference = costs.gemm(
                dtype=dtype, product=product, num_experts=num_experts, rows=rows, d_in=d_in,
                d_out=d_out,
            )  # fmt: skip
            yield seconds / reference.seconds


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
