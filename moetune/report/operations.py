"""Operations of a profile as curves over their size, and what they take from each other."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

from moetune.domain.cluster import placement_name
from moetune.domain.costs import LinearCost
from moetune.domain.gemm_forms import GemmForm
from moetune.domain.interference import Interference
from moetune.domain.profile import CollectiveLine, CopyLine, FitError, GemmLine, Profile
from moetune.domain.samples import LAUNCHES, ResourceClass
from moetune.fit.curve import Line
from moetune.fit.index import Points, ProfileIndex, index_of
from moetune.fit.pool import CollectiveKey, CopyKey, Shape

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
        label: seeds the operation's random draws, as in the plan's own resamples.
    """

    name: str
    kind: str
    unit: str
    find: Callable[[], Points | Line]
    num_points: int
    line: LinearCost | None
    error: FitError | None
    label: str

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
    return (
        *_collectives(index),
        *_gemms(index),
        *_copies(index),
        *_memory_bound(index),
        *_attention(index),
    )


def _collectives(index: ProfileIndex) -> Iterator[OperationCurve]:
    lines: dict[CollectiveKey, CollectiveLine] = {
        (line.op, line.group_size, line.num_nodes, line.in_flight): line
        for line in index.profile.collective
    }
    for key in sorted(index.pool.collective.keys() | lines.keys()):
        op, group_size, num_nodes, in_flight = key
        line = lines.get(key)
        flight = f", {in_flight} in flight" if in_flight > 1 else ""
        place = placement_name((group_size, num_nodes), index.profile.machine)
        yield OperationCurve(
            name=f"{op}, {place}{flight}",
            kind="collective",
            unit="bytes",
            **_known(index.collective(key)),
            line=line.cost if line else None,
            error=line.error if line else None,
            label=f"collective {key}",
        )


def _gemms(index: ProfileIndex) -> Iterator[OperationCurve]:
    lines = {line.dtype: line for line in index.profile.gemm}
    for dtype, product, shape in sorted(index.pool.gemm):
        surface = index.surface(dtype, product)
        series = surface.series(shape)
        assert series is not None  # noqa: S101 - the pool names what was measured
        num_experts, d_in, d_out = shape
        line = lines.get(dtype)
        yield OperationCurve(
            name=f"gemm {dtype} {product}, {num_experts} × {d_in} × {d_out}",
            kind="GEMM",
            unit="rows",
            find=partial(_points_of, index, dtype, product, shape),
            num_points=len(series.sizes),
            line=_per_row(line, macs=num_experts * d_in * d_out) if line else None,
            error=line.error if line else None,
            label=f"{surface.family} {shape}",
        )
    for line in lines.values():
        found = index.gemm_line(line.dtype)
        if found is not None:
            yield OperationCurve(
                name=f"gemm {line.dtype}",
                kind="GEMM",
                unit="MACs",
                **_known(found),
                line=line.cost,
                error=line.error,
                label=f"gemm {line.dtype}",
            )


def _points_of(index: ProfileIndex, dtype: str, product: GemmForm, shape: Shape) -> Points:
    points = index.gemm_points(dtype, product, shape)
    assert points is not None  # noqa: S101 - the pool names what was measured
    return points


class _Known(TypedDict):
    find: Callable[[], Points | Line]
    num_points: int


def _known(found: Points | Line) -> _Known:
    number = len(found.series.sizes) if isinstance(found, Points) else 0
    return {"find": lambda: found, "num_points": number}


def _per_row(line: GemmLine, *, macs: int) -> LinearCost:
    """Return the line over rows of `macs` multiply-accumulates each."""
    return LinearCost(
        alpha_seconds=line.alpha_seconds, beta_seconds=line.beta_seconds_per_mac * macs
    )


def _copies(index: ProfileIndex) -> Iterator[OperationCurve]:
    lines: dict[CopyKey, CopyLine] = {
        (line.direction, line.pinned, line.both_ways): line for line in index.profile.copy
    }
    for key in index.copies():
        direction, pinned, both_ways = key
        line = lines.get(key)
        both = ", both ways" if both_ways else ""
        yield OperationCurve(
            name=f"{direction} {'pinned' if pinned else 'pageable'}{both}",
            kind="copy",
            unit="bytes",
            **_known(index.copy(key)),
            line=line.cost if line else None,
            error=line.error if line else None,
            label=f"copy {key}",
        )


def _memory_bound(index: ProfileIndex) -> Iterator[OperationCurve]:
    for op, dtype in index.rows_keys():
        known = index.rows((op, dtype))
        assert known is not None  # noqa: S101 - it is one of the keys
        yield OperationCurve(
            name=f"{op} {dtype}",
            kind="memory-bound operation",
            unit="chunks" if op in LAUNCHES else "elements",
            **_known(known),
            line=known.cost if isinstance(known, Line) else None,
            error=None,
            label=f"rows {(op, dtype)}",
        )


def _attention(index: ProfileIndex) -> Iterator[OperationCurve]:
    for key in sorted(index.pool.attention):
        dtype, length, num_heads, head_dim, backward = key
        points = index.attention(key)
        yield OperationCurve(
            name=f"attention {dtype}{' backward' if backward else ''}, "
            f"{length} long, {num_heads} × {head_dim}",
            kind="attention",
            unit="sequences",
            **_known(points),
            line=None,
            error=None,
            label=points.label,
        )


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
