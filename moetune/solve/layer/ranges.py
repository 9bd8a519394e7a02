"""Ranges of tokens and their degrees: exact where costs are lines, few where they are measured.

Measured curves have noise, and with it near-ties: the best degree would change at every other
size, for gains too small to measure.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from moetune.domain.layer import PHASES, Phase
from moetune.domain.plan import Range
from moetune.solve.layer.choose import NOISE, WORTH, DegreeChooser

TOLERANCE = 0.004
"""Tolerated loss of a phase against its best at the solved sizes, where costs are published.

Between them a step loses a tenth of a percent more where curves ripple by 10 %.
"""
RESOLUTION = 256
"""A change is found to 1/256 of T: on both sides of it the times are equal."""
POINTS_PER_OCTAVE = 8

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
    reuses = chooser.strategy != "none"
    of_phase = _simulated_times if reuses else _times
    times = [of_phase(chooser, phase, sizes) for phase in PHASES]
    good = [_good(each, NOISE if chooser.is_measured else TOLERANCE) for each in times]
    if chooser.is_measured and not reuses:
        few = [_fewest(each) for each in times]
        around = np.array([chooser.costs.overhead(tokens=size).seconds for size in sizes])
        worth_it = _chunks_are_worth_it(times, few, around)
        good = [np.where(worth_it[:, None], many, one) for many, one in zip(good, few, strict=True)]
    for phase, degree in zip(good, own, strict=True):
        phase[sizes.index(tokens)] = np.arange(1, phase.shape[1] + 1) == degree
    firsts = _firsts(good)
    chosen: list[_Degrees] = []
    for first, end in zip(firsts, [*firsts[1:], len(sizes)], strict=True):
        forward, backward = (_smallest(phase[first:end]) for phase in good)
        chosen.append((forward, backward))
    lows = [1]
    for at, (before, after) in zip(firsts[1:], pairwise(chosen), strict=True):
        lows.append(_change(chooser, sizes[at - 1], sizes[at], before, after))
    highs = [low - 1 for low in lows[1:]] + [sizes[-1]]
    return tuple(
        (low, high, *degrees) for low, high, degrees in zip(lows, highs, chosen, strict=True)
    )


def _firsts(good: Sequence[_Bools]) -> list[int]:
    """Return the index of each range's first size; `good` has, by phase, shape (sizes, degrees)."""
    firsts = [0]
    alive = [phase[0] for phase in good]
    for at in range(1, len(good[0])):
        alive = [left & phase[at] for left, phase in zip(alive, good, strict=True)]
        if not all(left.any() for left in alive):
            firsts.append(at)
            alive = [phase[at] for phase in good]
    return firsts


def _smallest(good: _Bools) -> int:
    """Return the smallest degree that is good at all these sizes."""
    return int(good.all(axis=0).argmax()) + 1


def _change(chooser: DegreeChooser, low: int, high: int, before: _Degrees, after: _Degrees) -> int:
    """Return the size after `low` and up to `high` from which the degrees `after` are faster."""
    while high - low > max(1, low // RESOLUTION):
        middle = (low + high) // 2
        allowed = (chooser.allowed(phase, middle) for phase in PHASES)
        if all(degree in among for degree, among in zip(after, allowed, strict=True)) and (
            _seconds(chooser, middle, after) <= _seconds(chooser, middle, before)
        ):
            high = middle
        else:
            low = middle
    return high


def _seconds(chooser: DegreeChooser, tokens: int, degrees: _Degrees) -> float:
    return sum(
        chooser.time(phase, tokens, degree).seconds
        for phase, degree in zip(PHASES, degrees, strict=True)
    )


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


def _simulated_times(chooser: DegreeChooser, phase: Phase, sizes: Sequence[int]) -> _Floats:
    """Return the time of each degree near the best, ∞ for others, shape (sizes, degrees)."""
    near = [chooser.near_best(phase, size) for size in sizes]
    times = np.full((len(sizes), max(max(one) for one in near)), math.inf)
    for at, one in enumerate(near):
        for degree, seconds in one.items():
            times[at, degree - 1] = seconds
    return times


def _times(chooser: DegreeChooser, phase: Phase, sizes: Sequence[int]) -> _Floats:
    """Return the time of each degree, ∞ where it is not allowed.

    Chunk costs are interpolated on a geometric grid, linearly, so that lines stay exact: eight
    points a factor of two meet a smooth curve within 0.1 %. Evaluating the measured curves for
    every degree at every size would take ten times as long.

    Returns:
        Shape (sizes, degrees).
    """
    allowed = [chooser.allowed(phase, size) for size in sizes]
    times = np.full((len(sizes), max(one[-1] for one in allowed)), math.inf)
    costs, top_k = chooser.costs, chooser.costs.layer.top_k
    errors = [costs.step_errors(tokens=size) for size in sizes]
    rows = np.asarray(sizes, float) * top_k
    grid = _grid(float(top_k), float(rows[-1]))
    compute = np.array([costs.compute(phase=phase, rows=one).seconds for one in grid])
    for degree in sorted(set().union(*allowed)):
        where = [at for at, one in enumerate(allowed) if degree in one]
        chunk = rows[where] / degree
        near = grid[: np.searchsorted(grid, chunk[-1]) + 1]
        near = near[max(np.searchsorted(near, chunk[0], side="right") - 1, 0) :]
        transfer = np.array([costs.transfer(rows=one, degree=degree).seconds for one in near])
        in_step = np.array([errors[at].factor(degree) for at in where])
        chunks = zip(
            chunk.tolist(),
            (in_step * np.interp(chunk, near, transfer)).tolist(),
            (in_step * np.interp(chunk, grid, compute)).tolist(),
            strict=True,
        )
        times[where, degree - 1] = [
            costs.makespan(
                degree=degree,
                rows=one,
                transfer_seconds=transfer_seconds,
                compute_seconds=compute_seconds,
                order=chooser.bounds.chosen_order,
            )
            for one, transfer_seconds, compute_seconds in chunks
        ]
    return times


def _grid(low: float, high: float) -> _Floats:
    """Return rows from at most `low` to at least `high`, eight a factor of two."""
    first = math.floor(POINTS_PER_OCTAVE * math.log2(low))
    last = math.ceil(POINTS_PER_OCTAVE * math.log2(high))
    return np.exp2(np.arange(first, last + 1) / POINTS_PER_OCTAVE)


SINGLE_TOKENS = 16
STEPS_PER_OCTAVE = 8
STEPS_WHERE_SIMULATED = 2
MIN_TOP = 2**20
HEADROOM = 4

Step = tuple[int, int]
"""(tokens, the degree from there on)."""


def solve_ranges(
    *, chooser: DegreeChooser, tokens: int, forward_degree: int, backward_degree: int
) -> tuple[Range, ...]:
    """Return disjoint, sorted ranges without gaps from 1 to at least 4·tokens and 2^20.

    Where the costs are lines, every size up to 16, then 8 a factor of two, and `tokens` itself
    are solved; between two neighbours that differ the change is bisected to the token. A pair of
    changes between two equal neighbours is not seen: a degree that is best over less than a
    tenth of T. Where costs are measured, degrees that are as good as the best at the same sizes
    are held as long as they are (`fewest_ranges`). Where memory is reused every degree has to be
    simulated, and two sizes a factor of two are solved.

    Args:
        tokens: the plan's own, per rank.
        forward_degree: the plan's own, which holds for `tokens`.
        backward_degree: the same.
    """
    top = max(MIN_TOP, HEADROOM * tokens)
    if not chooser.is_closed:
        few = STEPS_PER_OCTAVE if chooser.strategy == "none" else STEPS_WHERE_SIMULATED
        sizes = {*_samples(top, few), *_limits(chooser, top), tokens}
        own = forward_degree, backward_degree
        return fewest_ranges(chooser=chooser, sizes=sorted(sizes), tokens=tokens, own=own)
    samples = sorted({*_samples(top, STEPS_PER_OCTAVE), tokens})
    chosen: dict[Phase, int] = {"forward": forward_degree, "backward": backward_degree}

    def steps(phase: Phase) -> list[Step]:
        def degree(size: int) -> int:
            return chosen[phase] if size == tokens else chooser.degree(phase, size)

        solved = [(sample, degree(sample)) for sample in samples]
        changes = (_changes(degree, low, high) for low, high in pairwise(solved))
        return [solved[0], *chain.from_iterable(changes)]

    forward, backward = (steps(phase) for phase in PHASES)
    lows = sorted({low for low, _ in (*forward, *backward)})
    highs = [low - 1 for low in lows[1:]] + [top]
    return tuple(
        (low, high, _at(forward, low), _at(backward, low))
        for low, high in zip(lows, highs, strict=True)
    )


def _samples(top: int, steps_per_octave: int) -> Iterator[int]:
    yield from range(1, SINGLE_TOKENS + 1)
    step = 1
    while (sample := round(SINGLE_TOKENS * 2 ** (step / steps_per_octave))) < top:
        yield sample
        step += 1
    yield top


def _limits(chooser: DegreeChooser, top: int) -> Iterator[int]:
    """Yield the sizes at which the allowed degrees change, and their neighbours."""
    for phase in PHASES:
        yield from range(1, min(chooser.bounds.pinned(phase) or 1, top) + 1)
    if chooser.budget is not None:
        for degree in range(1, chooser.bounds.max_degree + 1):
            most = chooser.budget.most_tokens(strategy=chooser.strategy, degrees=(degree, degree))
            yield from (size for size in (most, most + 1) if 1 <= size < top)
    if chooser.max_pipelined_tokens < top:
        last = math.floor(chooser.max_pipelined_tokens)
        yield from (size for size in (last, last + 1) if size >= 1)


def _changes(degree: Callable[[int], int], low: Step, high: Step) -> list[Step]:
    """Return every change found after `low` and up to `high`."""
    if low[1] == high[1]:
        return []
    if high[0] - low[0] == 1:
        return [high]
    middle = (low[0] + high[0]) // 2
    between = middle, degree(middle)
    return _changes(degree, low, between) + _changes(degree, between, high)


def _at(steps: Sequence[Step], tokens: int) -> int:
    """Return the degree that holds for so many tokens."""
    return steps[bisect_right(steps, tokens, key=lambda step: step[0]) - 1][1]
