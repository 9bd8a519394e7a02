"""Operations of a profile, each with its line, its measured sizes and the error of its fit."""

import math
from dataclasses import dataclass, replace

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
from moetune.domain.profile import FitError, GemmLine, Profile
from moetune.domain.samples import LAUNCHES
from moetune.fit.index import ProfileIndex, index_of


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationFit:
    """One operation over its size.

    Args:
        name: unique in the profile, such as "all_to_all, 8 ranks, 4 in flight".
        kind: "collective", "GEMM", "copy", "memory-bound operation" or "attention".
        unit: of the size: "bytes", "rows", "elements", "chunks", "sequences" or "MACs".
        num_points: measured sizes.
        line: the α–β line over the same size, in seconds.
        error: of the line's fit; of a GEMM's shape, that of its dtype's line.
    """

    name: str
    kind: str
    unit: str
    num_points: int = 0
    line: LinearCost | None
    error: FitError | None

    @property
    def is_shape(self) -> bool:
        """Whether this is one of the many shapes of a GEMM or of attention."""
        return self.kind == "attention" or (self.kind == "GEMM" and self.unit == "rows")


def operations_of(profile: Profile) -> tuple[OperationFit, ...]:
    """Return all operations of the profile, collectives first."""
    index = index_of(profile)
    first: list[CostKey] = [*index.keys(CollectiveKey), *index.pool.of(GemmKey)]
    last: list[CostKey] = [*index.keys(CopyKey), *index.keys(RowsKey)]
    last += index.keys(AttentionKey)
    return (
        *(_fit(index, key) for key in first),
        *(gemm_line(line) for line in profile.gemm if index.gemm_line(line.dtype)),
        *(_fit(index, key) for key in last),
    )


def _fit(index: ProfileIndex, key: CostKey) -> OperationFit:
    """Return an operation; the line of a GEMM's shape is its dtype's, over rows."""
    series, line = index.pool.series.get(key), index.lines.get(key)
    cost = line.cost if line else None
    if isinstance(key, GemmKey):
        line = index.lines.get(GemmKey(key.dtype))
        scale = math.prod(key.shape)
        cost = replace(line.cost, beta_seconds=line.cost.beta_seconds * scale) if line else None
    name, kind, unit = _words(key, index.profile.machine)
    return OperationFit(
        name=name, kind=kind, unit=unit, num_points=len(series.sizes) if series else 0,
        line=cost, error=line.error if line else None,
    )  # fmt: skip


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
            by = f", by {key.kernel}" if key.kernel else ""
            return f"gemm {key.dtype} {key.product}, {shape}{by}", "GEMM", unit_of(key)


def gemm_line(line: GemmLine) -> OperationFit:
    """Return a dtype's line over all its GEMMs, over multiply-accumulates."""
    name = f"gemm {line.dtype}"
    return OperationFit(name=name, kind="GEMM", unit="MACs", line=line.cost, error=line.error)
