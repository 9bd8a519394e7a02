"""The fewest ranges of tokens where costs are measured, by the degrees that are good at each size.

Measured curves have noise, and with it near-ties: the best degree would change at every other
size, for gains too small to measure.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from moetune.domain.arrays import array_of
from moetune.domain.layer import PHASES, Phase
from moetune.domain.plan import Range
from moetune.solve.layer.changes import Change, places_of
from moetune.solve.layer.choose import NOISE, WORTH, DegreeChooser
from moetune.solve.layer.closed import closed_times
from moetune.solve.layer.simulated import Cases, near_best_of

TOLERANCE = 0.004
"""Tolerated loss of a phase against its best at the solved sizes, where costs are published.

Between them a step loses a tenth of a percent more where curves ripple by 10 %.
"""

_Floats = NDArray[np.float64]
_Bools = NDArray[np.bool_]
_Degrees = tuple[int, int]


def fewest_ranges(
    *, chooser: DegreeChooser, sizes: Sequence[int], tokens: int, own: _Degrees
) -> tuple[Range, ...]:
    """Return the fewest ranges whose degrees are within the tolerance at all sizes in them.

    Where measured chunks are not worth it, only the fewest are good (`choose.WORTH`).

    From left to right, each range goes on while each phase has a degree that is good for all of
    it, which gives the fewest. Then two ranges meet where both take as long.

    Args:
        sizes: to solve, ascending and with `tokens` among them; the last one ends the table.
        tokens: the plan's own, per rank.
        own: the plan's degrees, forward and backward, which hold for `tokens`.
    """
    at_own = sizes.index(tokens)
    table = _simulated if chooser.strategy != "none" else _evaluated
    good = [
        _with_own(each, at_own, degree)
        for each, degree in zip(table(chooser, sizes), own, strict=True)
    ]
    firsts, chosen = fewest_runs(good, len(sizes), chooser.bounds.max_degree)
    changes = [
        Change(sizes[at - 1], sizes[at], *degrees)
        for at, degrees in zip(firsts[1:], pairwise(chosen), strict=True)
    ]
    lows = [1, *places_of(chooser, changes)]
    if chooser.room is not None:
        for at, one in enumerate(changes, start=1):
            if not chooser.room.fits(lows[at] - 1, one.before):
                most = max(chooser.room.most_tokens(one.before), one.low)
                lows[at] = min(lows[at], most + 1)
    highs = [low - 1 for low in lows[1:]] + [sizes[-1]]
    return tuple(
        (low, high, *degrees) for low, high, degrees in zip(lows, highs, chosen, strict=True)
    )


Good = Callable[[int, int], bool]
"""Whether the size at an index may have so many chunks."""


def _with_own(good: Good, at_own: int, own: int) -> Good:
    """Return the same with the plan's own degree alone at its size."""
    return lambda at, degree: degree == own if at == at_own else good(at, degree)


def fewest_runs(
    good: Sequence[Good], num_sizes: int, max_degree: int
) -> tuple[list[int], list[_Degrees]]:
    """Return the index of each range's first size, and the smallest degrees good in all of it.

    A range goes on while both phases have a degree that is good in all of it; 0 stands where the
    first size of a range has none. No more is asked than decides that.
    """

    def smallest(first: int, at: int, degrees: _Degrees) -> _Degrees:
        forward, backward = (
            _smallest(phase, first, at, range(degree, max_degree + 1))
            for phase, degree in zip(good, degrees, strict=True)
        )
        return forward, backward

    firsts, chosen = [0], [smallest(0, 0, (0, 0))]
    for at in range(1, num_sizes):
        longer = smallest(firsts[-1], at, chosen[-1])
        if all(longer):
            chosen[-1] = longer
        else:
            firsts.append(at)
            chosen.append(smallest(at, at, (0, 0)))
    return firsts, chosen


def _smallest(good: Good, first: int, at: int, degrees: range) -> int:
    """Return the smallest degree that is good from the first size to another, 0 without any.

    Args:
        degrees: beginning with the smallest that is good up to the size before, or with 0.
    """
    degree, *more = degrees
    if first < at and (not degree or good(at, degree)):
        return degree
    sizes = range(at, first - 1, -1)
    return next((one for one in more if all(good(size, one) for size in sizes)), 0)


def _good(times: _Floats, tolerance: float) -> _Bools:
    """Return which degrees are as good as the best one of their size."""
    good: _Bools = np.less_equal(times, times.min(axis=1, keepdims=True) * (1 + tolerance))
    return good


def _fewest(times: _Floats) -> _Bools:
    """Return where each size's smallest degree is, shape (sizes, degrees)."""
    smallest = np.isfinite(times).argmax(axis=1)
    fewest: _Bools = np.arange(times.shape[1]) == smallest[:, None]
    return fewest


def _chunks_are_worth_it(
    times: Sequence[_Floats], few: Sequence[_Bools], around: _Floats
) -> _Bools:
    """Return at which sizes the best degrees save enough of a step, shape (sizes,)."""
    best, fewest = around.copy(), around.copy()
    for each, one in zip(times, few, strict=True):
        best += each.min(axis=1)
        fewest += each[one]
    worth_it: _Bools = np.less_equal(best, fewest * (1 - WORTH))
    return worth_it


def _simulated(chooser: DegreeChooser, sizes: Sequence[int]) -> Iterator[Good]:
    """Yield each phase's good degrees where those that may be have to be simulated."""
    tolerance = NOISE if chooser.is_measured else TOLERANCE
    together = [PHASES] if chooser.is_paired else [(phase,) for phase in PHASES]
    allowed = [[chooser.allowed(first, size) for size in sizes] for first, *_ in together]
    lengths = np.array([[len(degrees) for degrees in each] for each in allowed])
    asked = [
        Cases(phases, np.repeat(sizes, nums), np.concatenate(each))
        for phases, each, nums in zip(together, allowed, lengths, strict=True)
    ]
    near = near_best_of(asked, costs=chooser.costs, strategy=chooser.strategy, tolerance=tolerance)
    firsts = (np.cumsum(lengths) - lengths.ravel()).reshape(lengths.shape).tolist()
    good = [partial(_is_near, near, *each) for each in zip(allowed, firsts, strict=True)]
    yield from (good[0], good[-1])


def _is_near(
    near: Sequence[bool],
    allowed: Sequence[Sequence[int]],
    firsts: Sequence[int],
    at: int,
    degree: int,
) -> bool:
    """Return whether a number of chunks is allowed at a size, and near the best.

    Args:
        allowed: degrees of each size.
        firsts: index of each size's first case.
    """
    place = bisect_left(allowed[at], degree)
    is_allowed = place < len(allowed[at]) and allowed[at][place] == degree
    return is_allowed and near[firsts[at] + place]


def _compared(chooser: DegreeChooser) -> tuple[Phase, ...]:
    """Return the phases whose degrees are chosen; the first one where both have as many."""
    return PHASES[:1] if chooser.is_paired else PHASES


def _evaluated(chooser: DegreeChooser, sizes: Sequence[int]) -> Iterator[Good]:
    """Yield each phase's good degrees from the times of all of them."""
    allowed = [_allowed(chooser, phase, sizes) for phase in _compared(chooser)]
    times = [
        _times(chooser, phase, sizes, each)
        for phase, each in zip(PHASES, (allowed[0], allowed[-1]), strict=True)
    ]
    compared = [times[0] + times[1]] if chooser.is_paired else times
    good = [_good(each, NOISE if chooser.is_measured else TOLERANCE) for each in compared]
    if chooser.is_measured:
        few = [_fewest(each) for each in compared]
        tokens = array_of(np.asarray(sizes, float))
        around = np.zeros(len(sizes)) + chooser.costs.overhead(tokens=tokens).seconds
        worth_it = _chunks_are_worth_it(compared, few, around)
        good = [np.where(worth_it[:, None], many, one) for many, one in zip(good, few, strict=True)]
    tables = [each.tolist() for each in good]
    yield from (partial(_is_set, tables[0]), partial(_is_set, tables[-1]))


def _is_set(good: Sequence[Sequence[bool]], at: int, degree: int) -> bool:
    return degree <= len(good[at]) and good[at][degree - 1]


def _allowed(chooser: DegreeChooser, phase: Phase, sizes: Sequence[int]) -> _Bools:
    """Return which degrees each size may have, shape (sizes, degrees)."""
    degrees = [chooser.allowed(phase, size) for size in sizes]
    found = np.zeros((len(sizes), max(one[-1] for one in degrees)), bool)
    for row, each in zip(found, degrees, strict=True):
        row[np.asarray(each) - 1] = True
    return found


def _times(chooser: DegreeChooser, phase: Phase, sizes: Sequence[int], allowed: _Bools) -> _Floats:
    """Return the time of each degree, ∞ where it is not allowed, shape (sizes, degrees).

    Args:
        allowed: degrees of each size, of the same shape.
    """
    times = np.full(allowed.shape, math.inf)
    at, below = np.nonzero(allowed)
    times[at, below] = closed_times(
        costs=chooser.costs, phase=phase, tokens=np.asarray(sizes)[at], degrees=below + 1,
        order=chooser.bounds.chosen_order,
    )  # fmt: skip
    return times
