"""Operations of a profile as curves over their size, and what they take from each other."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from moetune.domain.cluster import Machine, placement_name
from moetune.domain.cost_keys import (
    AttentionKey,
    CollectiveKey,
    CopyKey,
    CostKey,
    GemmKey,
    RowsKey,
    unit_of,
)
from moetune.domain.costs import LinearCost
from moetune.domain.interference import Interference
from moetune.domain.profile import FitError, GemmLine, Profile
from moetune.domain.samples import LAUNCHES, ResourceClass
from moetune.fit.curve import Line
from moetune.fit.index import Points, ProfileIndex, index_of

_NOT_IN_KEYS = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationCurve:
    """One operation over its size.

    Args:
        name: unique in the profile, such as "all_to_all, 8 ranks, 4 in flight".
        kind: "collective", "GEMM", "copy", "memory-bound operation" or "attention".
        unit: of the size: "bytes", "rows", "elements", "chunks", "sequences" or "MACs".
        find: returns the measured points, or the line where nothing was measured; of a table's
            GEMM it completes the curve, which takes milliseconds.
        num_points: known sizes.
        line: the α–β line over the same size, in seconds.
        error: of the line's fit; of a GEMM's shape, that of its dtype's line.
    """

    name: str
    kind: str
    unit: str
    find: Callable[[], Points | Line]
    num_points: int
    line: LinearCost | None
    error: FitError | None

    @property
    def key(self) -> str:
        """The name as letters, digits and hyphens, for addresses."""
        return _NOT_IN_KEYS.sub("-", self.name.lower()).strip("-")

    @property
    def is_shape(self) -> bool:
        """Whether this is one of the many shapes of a GEMM or of attention."""
        return self.kind == "attention" or (self.kind == "GEMM" and self.unit == "rows")

    @property
    def found(self) -> Points | Line:
        """The points or the line."""
        return self.find()


def operations_of(profile: Profile) -> tuple[OperationCurve, ...]:
    """Return all operations of the profile, collectives first."""
    index = index_of(profile)
    others: tuple[CostKey, ...] = (
        *index.keys(CopyKey),
        *index.keys(RowsKey),
        *index.keys(AttentionKey),
    )
    return (
        *(_operation(index, key) for key in index.keys(CollectiveKey)),
        *(_gemm(index, key) for key in index.pool.of(GemmKey)),
        *(gemm_line(line) for line in profile.gemm if index.gemm_line(line.dtype)),
        *(_operation(index, key) for key in others),
    )


def _operation(index: ProfileIndex, key: CostKey) -> OperationCurve:
    """Return a known operation whose line, if any, is over its own size."""
    known, line = index.basis(key), index.lines.get(key)
    assert known is not None  # noqa: S101 - it is one of the keys
    name, kind, unit = _words(key, index.profile.machine)
    return OperationCurve(
        name=name,
        kind=kind,
        unit=unit,
        find=lambda: known,
        num_points=len(known.series.sizes) if isinstance(known, Points) else 0,
        line=line.cost if line else None,
        error=line.error if line else None,
    )


def _words(key: CostKey, machine: Machine) -> tuple[str, str, str]:
    """Return an operation's name, its kind and the unit of its size."""
    match key:
        case CollectiveKey():
            flight = f", {key.in_flight} in flight" if key.in_flight > 1 else ""
            name = f"{key.op}, {placement_name(key.group, machine)}{flight}"
            return name, "collective", unit_of(key)
        case CopyKey():
            both = ", both ways" if key.both_ways else ""
            pinned = "pinned" if key.pinned else "pageable"
            return f"{key.direction} {pinned}{both}", "copy", unit_of(key)
        case RowsKey():
            unit = "chunks" if key.op in LAUNCHES else unit_of(key)
            return f"{key.op} {key.dtype}", "memory-bound operation", unit
        case AttentionKey():
            way = " backward" if key.backward else ""
            sizes = f"{key.length} long, {key.num_heads} × {key.head_dim}"
            return f"attention {key.dtype}{way}, {sizes}", "attention", unit_of(key)
        case GemmKey():
            shape = " × ".join(map(str, key.shape))
            return f"gemm {key.dtype} {key.product}, {shape}", "GEMM", unit_of(key)


def _gemm(index: ProfileIndex, key: GemmKey) -> OperationCurve:
    """Return a measured shape; its line is the dtype's, over rows."""
    name, kind, unit = _words(key, index.profile.machine)
    line = index.lines.get(GemmKey(key.dtype))
    cost = line.cost if line else None
    return OperationCurve(
        name=name,
        kind=kind,
        unit=unit,
        find=partial(_points_of, index, key),
        num_points=len(index.pool.series[key].sizes),
        line=replace(cost, beta_seconds=cost.beta_seconds * math.prod(key.shape)) if cost else None,
        error=line.error if line else None,
    )


def gemm_line(line: GemmLine) -> OperationCurve:
    """Return a dtype's line over all its GEMMs, over multiply-accumulates."""
    name = f"gemm {line.dtype}"
    found = Line(cost=line.cost, label=name)
    if line.error:
        found = replace(found, relative_error=line.error.median)
    return OperationCurve(
        name=name,
        kind="GEMM",
        unit="MACs",
        find=lambda: found,
        num_points=0,
        line=line.cost,
        error=line.error,
    )


def _points_of(index: ProfileIndex, key: GemmKey) -> Points:
    points = index.gemm_points(key)
    assert points is not None  # noqa: S101 - the pool names what was measured
    return points


CLASSES: dict[ResourceClass, str] = {
    "comp": "computation",
    "comm": "communication",
    "mem": "copies",
}
OVERLAPPED = (*CLASSES.values(), "both others")


def overlapped_speeds(table: Interference, victim: ResourceClass) -> tuple[float | None, ...]:
    """Return the victim's relative speed with each class (None: its own) and with both others."""
    alone = (
        None if other == victim else table.speed(victim, frozenset({other})) for other in CLASSES
    )
    return (*alone, table.speed(victim, frozenset(CLASSES)))
