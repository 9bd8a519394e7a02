"""The order of a session's visits: first what plans need most, then all points again and again.

A point is visited several times, with long gaps and in a new order each round. A burst of other
load then disturbs one visit of a point, not all. The clock may end a session after any visit. The
points so far are a smaller profile, in which each kind of operation has its extremes.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from moetune.domain.samples import Point, Sample, StepPoint, undisturbed
from moetune.measure.sizes import family, size_of

NUM_VISITS = 3
"""Visits of each point, if there is time: two visits that agree show which visit was disturbed."""
MAX_VISITS = 5
"""Visits after which further visits to a point add no certainty on this machine."""
CERTAIN = 0.02
"""Relative uncertainty at which a point needs no further visit."""
_WIDE = 16
"""The ratio of sizes within which a curve has at most one bend. A start-up time, a burst and a rate
make two bends: only 64 kB and 4 MB would predict half the time for exchanges of 512 kB."""
_NEW_KIND, _KNOWN_KIND = 2, 3
"""The number of tiers by which a grid's points come after the points that layers need."""
_AT_ONCE: Mapping[str, int] = MappingProxyType({"gemm": 4, "collective": 2})
"""Points of a kind that are visited in a turn; 1 for other kinds. Steps consist of these kinds."""
_FIRST_TURN: Mapping[str, int] = MappingProxyType({"interference": 2})
"""The first turn of kinds that take long and change a step less; 0 for other kinds."""
_STEP = 1
"""The tier of whole steps, which show how far a sum of operations is from a step. It comes after
the ends of all operations in a step."""


def tiers(needed: Sequence[Point], optional: Sequence[Point]) -> tuple[tuple[Point, ...], ...]:
    """Return the points in tiers, the most valuable tier first; no tier is empty.

    A family is a curve of the profile. Its two ends come first, then its middle and the middles of
    gaps that are still wide, then all other points. Families that no layer needs begin two tiers
    later, and further sizes of needed families three tiers later. Whole steps come once there are
    operations to compare them with.

    Args:
        needed: points of the layers and models that will be planned.
        optional: points of further sizes and kinds.
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
    """Return the points to visit in a round, counted from 0: the next tier, and all earlier tiers.

    Both are in a random order that the seed decides, but kinds of points take turns. The largest
    size of a new curve comes first: a session that ends there extrapolates no start-up time.
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
    """Return the relative spread of the medians of the least disturbed visits.

    It is infinite for a single such visit, because nothing shows whether it was disturbed.

    Args:
        visits: visits of one point that have times.
    """
    medians = [visit.median_seconds for visit in undisturbed(visits)]
    if len(medians) == 1:
        return math.inf
    return max(medians) / min(medians) - 1


def _largest_first(points: Sequence[Point]) -> list[Point]:
    """Return the points, with each family's points reordered by falling size in its places."""
    families: dict[object, list[Point]] = {}
    for point in sorted(points, key=size_of):
        families.setdefault(family(point), []).append(point)
    return [families[family(point)].pop() for point in points]


def _in_turns(points: Sequence[Point]) -> list[Point]:
    """Return some points of each kind and operation, then the next points of each, and so on."""
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
    """Return each point's depth in its family: 0 for both ends, 1 for the middles of wide gaps."""
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
