"""Few ranges where costs are measured: each as long as its degrees stay near the best.

Measured curves have noise, and with it near-ties: the best degree would change at every other
size, by nothing that anybody could measure.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from moetune.domain.plan import Range
from moetune.solve.choice import DegreeChooser
from moetune.solve.degree import makespan
from moetune.solve.phases import PHASES, Phase

TOLERANCE = 0.004
"""How much slower than the best a phase may be at the solved sizes. Between them a
step loses up to 0.5 % where curves ripple by 10 %, and may lose more where they ripple more."""
RESOLUTION = 256
"""A change is found to 1/256 of T: on both sides of it the times are equal."""
POINTS_PER_OCTAVE = 8

_Floats = NDArray[np.float64]
_Bools = NDArray[np.bool_]
_Degrees = tuple[int, int]


def cover(
    *, chooser: DegreeChooser, sizes: Sequence[int], tokens: int, own: _Degrees
) -> tuple[Range, ...]:
    """Return the fewest ranges whose degrees are within the tolerance at all sizes in them.

    From left to right, each range goes on while any degree of either phase is good for all of
    it: no cover has fewer. Then the change between two ranges is put where both take as long.

    Args:
        sizes: to solve, ascending and with `tokens` among them; the last one ends the table.
        tokens: the plan's own, per rank.
        own: the plan's degrees, forward and backward, which hold for `tokens`.
    """
    losses = [_losses(chooser, phase, sizes) for phase in PHASES]
    good = [loss <= TOLERANCE for loss in losses]
    for phase, degree in zip(good, own, strict=True):
        phase[sizes.index(tokens)] = np.arange(1, phase.shape[1] + 1) == degree
    firsts = _firsts(good)
    chosen: list[_Degrees] = []
    for first, end in zip(firsts, [*firsts[1:], len(sizes)], strict=True):
        forward, backward = (
            _least(loss[first:end], phase[first:end])
            for loss, phase in zip(losses, good, strict=True)
        )
        chosen.append((forward, backward))
    lows = [1]
    for at, (before, after) in zip(firsts[1:], pairwise(chosen), strict=True):
        lows.append(_change(chooser, sizes[at - 1], sizes[at], before, after))
    highs = [low - 1 for low in lows[1:]] + [sizes[-1]]
    return tuple(
        (low, high, *degrees) for low, high, degrees in zip(lows, highs, chosen, strict=True)
    )


def _firsts(good: Sequence[_Bools]) -> list[int]:
    """Return at which size each range begins; `good` has, by phase, shape (sizes, degrees)."""
    firsts = [0]
    alive = [phase[0] for phase in good]
    for at in range(1, len(good[0])):
        alive = [left & phase[at] for left, phase in zip(alive, good, strict=True)]
        if not all(left.any() for left in alive):
            firsts.append(at)
            alive = [phase[at] for phase in good]
    return firsts


def _least(losses: _Floats, good: _Bools) -> int:
    """Return the degree that is good at all these sizes and loses least over them."""
    summed = np.where(good.all(axis=0), losses.sum(axis=0), math.inf)
    return int(summed.argmin()) + 1


def _change(chooser: DegreeChooser, low: int, high: int, before: _Degrees, after: _Degrees) -> int:
    """Return from which size after `low` and up to `high` the degrees `after` are faster."""
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


def _losses(chooser: DegreeChooser, phase: Phase, sizes: Sequence[int]) -> _Floats:
    """Return how much slower than the best each degree is, ∞ where it is not allowed.

    Chunk costs are interpolated on a geometric grid, linearly, so that lines stay exact: eight
    points a factor of two meet a smooth curve within 0.1 %. To ask the measured curves for
    every degree at every size would take ten times as long.

    Returns:
        Shape (sizes, degrees).
    """
    allowed = [chooser.allowed(phase, size) for size in sizes]
    times = np.full((len(sizes), max(one[-1] for one in allowed)), math.inf)
    costs, top_k = chooser.costs, chooser.costs.layer.top_k
    rows = np.asarray(sizes, float) * top_k
    grid = _grid(float(top_k), float(rows[-1]))
    compute = np.array([costs.compute(phase=phase, rows=one).seconds for one in grid])
    speeds = costs.costs.interference
    for degree in range(1, times.shape[1] + 1):
        where = [at for at, one in enumerate(allowed) if degree in one]
        if not where:
            continue
        chunk = rows[where] / degree
        near = grid[: np.searchsorted(grid, chunk[-1]) + 1]
        near = near[max(np.searchsorted(near, chunk[0], side="right") - 1, 0) :]
        transfer = np.array([costs.transfer(rows=one, degree=degree).seconds for one in near])
        pairs = zip(np.interp(chunk, near, transfer), np.interp(chunk, grid, compute), strict=True)
        times[where, degree - 1] = [
            makespan(
                degree=degree,
                transfer_seconds=float(transfer_seconds),
                compute_seconds=float(compute_seconds),
                comm_speed=speeds.comm.comp,
                comp_speed=speeds.comp.comm,
                order=chooser.bounds.chosen_order,
            )
            for transfer_seconds, compute_seconds in pairs
        ]
    best = times.min(axis=1, keepdims=True)
    return times / np.where(best > 0, best, 1.0) - 1


def _grid(low: float, high: float) -> _Floats:
    """Return rows from at most `low` to at least `high`, eight a factor of two."""
    first = math.floor(POINTS_PER_OCTAVE * math.log2(low))
    last = math.ceil(POINTS_PER_OCTAVE * math.log2(high))
    return np.exp2(np.arange(first, last + 1) / POINTS_PER_OCTAVE)
