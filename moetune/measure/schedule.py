"""Order of a session's visits: what plans need most first, then everything again and again.

A point is visited several times, far apart and in another order each round: a neighbour's burst
then disturbs one visit of a point, not all. The clock may end a session after any visit; what was
measured until then is a smaller profile, in which every kind of operation has its extremes.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from moetune.domain.samples import Point, Sample, StepPoint, undisturbed
from moetune.measure.sizes import family, size_of

NUM_VISITS = 3
"""Visits of every point, if there is time: two that agree tell which visit was disturbed."""
MAX_VISITS = 5
"""Visits after which a point is as certain as this machine lets it be."""
CERTAIN = 0.02
"""Relative uncertainty at which a point needs no further visit."""
_WIDE = 16
"""Ratio of sizes within which a curve has one bend at most. A start-up time, a burst and a rate
make two: 64 kB and 4 MB alone put exchanges of 512 kB at half their time."""
_NEW_KIND, _KNOWN_KIND = 2, 3
"""Tiers by which a grid's points come after those that layers need."""
_AT_ONCE: Mapping[str, int] = MappingProxyType({"gemm": 4, "collective": 2})
"""Points of a kind that are visited in a turn; of the others, 1. Steps consist of these."""
_FIRST_TURN: Mapping[str, int] = MappingProxyType({"interference": 2})
"""Of kinds that take long and change a step by less; 0 of the others."""
_STEP = 1
"""Tier of whole steps, which say how far the sum of the operations is from them: after the ends of
all that they consist of."""


def tiers(needed: Sequence[Point], optional: Sequence[Point]) -> tuple[tuple[Point, ...], ...]:
    """Return the points by worth, the most valuable first; no tier is empty.

    A family is one curve of the profile. Its two ends come first, then its middle, and the middles
    of what is left for as long as that is wide, then all others. Families that no layer needs begin
    two tiers later; further sizes of needed ones, three. Whole steps come once there is something
    to compare them with.

    Args:
        needed: of the layers and models that will be planned.
        optional: further sizes and kinds.
    """
    worth = _depths(needed)
    worth |= {point: _STEP for point in worth if isinstance(point, StepPoint)}
    families = {family(point) for point in needed}
    for point, depth in _depths([point for point in optional if point not in worth]).items():
        worth[point] = depth + (_KNOWN_KIND if family(point) in families else _NEW_KIND)
    levels = sorted(set(worth.values()))
    return tuple(tuple(point for point in worth if worth[point] == level) for level in levels)


def round_of(
    tiers: Sequence[Sequence[Point]], number: int, seed: int
) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """Return the points to visit in a round, counted from 0: the next tier, and those before it.

    Both are in random order, which the seed decides, but kinds of points take turns. Of a new curve
    the largest size comes first: a session that ends there extrapolates no start-up time.
    """
    generator = np.random.default_rng((seed, number))
    new = tiers[number] if number < len(tiers) else ()
    again = [point for tier in tiers[:number] for point in tier]
    first, second = (
        [points[place] for place in generator.permutation(len(points)).tolist()]
        for points in (new, again)
    )
    return tuple(_in_turns(_largest_first(first))), tuple(_in_turns(second))


def relative_uncertainty(visits: Sequence[Sample]) -> float:
    """Return the relative width of the medians of the visits that were disturbed least.

    Infinite for fewer than two of them: nothing tells whether a single visit was disturbed.

    Args:
        visits: of one point, with times.
    """
    medians = [visit.median_seconds for visit in undisturbed(visits)]
    if len(medians) == 1:
        return math.inf
    return max(medians) / min(medians) - 1


def _largest_first(points: Sequence[Point]) -> list[Point]:
    """Return the points, where those of one family have their places by falling size."""
    families: dict[object, list[Point]] = {}
    for point in sorted(points, key=size_of):
        families.setdefault(family(point), []).append(point)
    return [families[family(point)].pop() for point in points]


def _in_turns(points: Sequence[Point]) -> list[Point]:
    """Return some points of each kind and operation, then the next points, and so on."""
    counts: Counter[object] = Counter()
    turns = []
    for point in points:
        kind = (point.kind, getattr(point, "op", ""))
        turn = counts[kind] // _AT_ONCE.get(point.kind, 1)
        turns.append(turn + _FIRST_TURN.get(point.kind, 0))
        counts[kind] += 1
    order = sorted(range(len(points)), key=turns.__getitem__)
    return [points[index] for index in order]


def _depths(points: Sequence[Point]) -> dict[Point, int]:
    """Return each point's depth in its family: 0 for both ends, 1 for middles of wide gaps."""
    families: dict[object, list[Point]] = {}
    for point in points:
        families.setdefault(family(point), []).append(point)
    depths = {
        point: depth
        for members in families.values()
        for point, depth in _bisected(sorted(members, key=size_of))
    }
    return {point: depths[point] for point in points}


def _bisected(members: Sequence[Point]) -> list[tuple[Point, int]]:
    depths = dict.fromkeys((0, len(members) - 1), 0)
    gaps = [(0, len(members) - 1, 1)]
    while gaps:
        low, high, depth = gaps.pop()
        if high - low > 1:
            middle = (low + high) // 2
            depths[middle] = depth
            for first, last in ((low, middle), (middle, high)):
                is_wide = size_of(members[last]) > _WIDE * size_of(members[first])
                gaps.append((first, last, depth + (not is_wide)))
    return [(members[index], depth) for index, depth in depths.items()]
