"""Estimates of how long points take, and the choice of those that fit a budget."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moetune.domain.cluster import Group
from moetune.domain.errors import InputError
from moetune.domain.samples import (
    AttentionPoint,
    CollectivePoint,
    CopyPoint,
    GemmPoint,
    InterferencePoint,
    Point,
    RowsPoint,
)
from moetune.domain.units import dtype_bytes, format_seconds
from moetune.measure.points import memory_bytes
from moetune.measure.timing import OVERLAPPED_SECONDS, Effort

_AGREEMENT_SECONDS = 2e-3
_BLOCKS_TO_SETTLE = 2
# Random numbers are drawn once for each tensor; a core draws a few hundred million a second.
_FILL_BYTES_PER_SECOND = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """Rough speed of an all-to-all, by one rank's input bytes."""

    seconds: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rough speeds from a first probe.

    Args:
        macs_per_second: by dtype.
        wires: of each group that is measured.
    """

    macs_per_second: Mapping[str, float]
    copy_bytes_per_second: float
    wires: Mapping[Group, Wire]


def operation_seconds(point: Point, rates: Rates) -> float:
    """Return about how long one run of the point's operation takes."""
    if isinstance(point, (GemmPoint, AttentionPoint)):
        return point.macs / rates.macs_per_second[point.dtype]
    if isinstance(point, RowsPoint):
        return 5 * point.elements * dtype_bytes(point.dtype) / rates.copy_bytes_per_second
    if isinstance(point, CollectivePoint):
        times = {"all_reduce": 2, "all_gather": point.group_size}.get(point.op, 1)
        wire = rates.wires[point.group]
        return point.in_flight * (wire.seconds + times * point.num_bytes / wire.bytes_per_second)
    if isinstance(point, CopyPoint):
        return point.num_bytes / rates.copy_bytes_per_second * (1 + point.both_ways)
    return 0.0


def point_seconds(point: Point, rates: Rates, effort: Effort) -> float:
    """Return about how long measuring the point takes, with its preparation."""
    effort = effort.for_point(point)
    if isinstance(point, InterferencePoint):
        return effort.warmup_seconds + max(effort.max_seconds, OVERLAPPED_SECONDS)
    block = max(operation_seconds(point, rates), effort.block_seconds) + _AGREEMENT_SECONDS
    return (
        memory_bytes(point) / _FILL_BYTES_PER_SECOND
        + max(effort.warmup_seconds, 2 * block)
        + max(min(_BLOCKS_TO_SETTLE * effort.min_blocks * block, effort.max_seconds), 3 * block)
    )


def within_budget(
    points: Sequence[Point], seconds: Mapping[Point, float], budget_seconds: float
) -> tuple[Point, ...]:
    """Return the most valuable points that fit the budget, in the order given.

    Each family (one curve of the profile) first gives its smallest and largest size, then the
    middle, then the quarters and so on; families given first go first.

    Raises:
        InputError: not even one point fits.
    """
    value = levels(points)
    kept: set[Point] = set()
    left = budget_seconds
    for point in sorted(points, key=lambda point: value[point]):
        if seconds[point] <= left:
            kept.add(point)
            left -= seconds[point]
    if not kept and points:
        cheapest = format_seconds(min(seconds[point] for point in points))
        raise InputError(
            f"a budget of {format_seconds(budget_seconds)} holds not one point",
            f"the cheapest takes about {cheapest}; a profile of one layer about one minute",
        )
    return tuple(point for point in points if point in kept)


def levels(points: Sequence[Point]) -> dict[Point, int]:
    """Return each point's place in its family by value, 0 for the one to measure first."""
    families: dict[object, list[Point]] = {}
    for point in points:
        families.setdefault(_family(point), []).append(point)
    return {
        point: level
        for family in families.values()
        for level, point in enumerate(_spread_order(sorted(family, key=_size)))
    }


def _spread_order(family: Sequence[Point]) -> list[Point]:
    """Return both ends, then the middle of every gap, the widest gaps first."""
    last = len(family) - 1
    order = list(dict.fromkeys((0, last)))
    gaps = [(0, last)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return [family[index] for index in order]


def _family(point: Point) -> object:
    if isinstance(point, GemmPoint):
        return (point.dtype, point.product, point.num_experts, point.d_in, point.d_out)
    if isinstance(point, RowsPoint):
        return (point.op, point.dtype, point.width)
    if isinstance(point, CollectivePoint):
        return (point.op, *point.group, point.in_flight)
    if isinstance(point, AttentionPoint):
        return (point.dtype, point.length, point.num_heads, point.head_dim, point.backward)
    if isinstance(point, CopyPoint):
        return (point.direction, point.pinned, point.both_ways)
    return point.victim


def _size(point: Point) -> int:
    if isinstance(point, (GemmPoint, RowsPoint)):
        return point.rows
    if isinstance(point, (CollectivePoint, CopyPoint)):
        return point.num_bytes
    if isinstance(point, AttentionPoint):
        return point.num_sequences
    # Alone first, then all the others together, then the pairs: `_spread_order` takes the ends.
    return len(point.others)
