"""Search in training: the next decision to try for one number of tokens, and when to stop.

Times are convex in the degree but for noise, so that lines through tried degrees bound what the
others can save.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from moetune.domain.layer import Phase
from moetune.domain.plan import Decision
from moetune.solve.layer.search_space import Degrees, Space

GAIN = 0.01
"""Least gain, as a share of a step, for which the search goes on, or leaves the plan's answer."""
REPEATS = 4
"""Measured steps of a trial."""
PRUNE_AFTER = 2
PRUNE_MARGIN = 0.05
"""A trial ends early when its fastest step is so much slower than the best trial's median."""
MAX_TRIALS = 16
"""Most trials for one number of tokens, where noise hides that the curve is convex."""

_Curve = Mapping[int, float]
"""Seconds by degree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One trial: times of the pipelined part in each of its measured steps."""

    decision: Decision
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]

    @property
    def seconds(self) -> tuple[float, ...]:
        """Forward and backward together, of each step."""
        return tuple(map(sum, zip(self.forward_seconds, self.backward_seconds, strict=True)))

    @property
    def median_seconds(self) -> float:
        """The median of the steps."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opening:
    """A run of degrees that were not tried yet.

    Args:
        degree: the one of them to try.
        gain_seconds: the most that any of them can save, ∞ where nothing is known.
    """

    degree: int
    gain_seconds: float


def next_decision(*, space: Space, tried: Sequence[Tried]) -> Decision | None:
    """Return what to try next; None when the expected gain is under `GAIN`.

    Args:
        tried: all trials so far, of `space` or of another one for the same tokens.
    """
    if not tried:
        return space.seed
    if len(tried) >= MAX_TRIALS:
        return None
    known = {one.decision for one in tried}
    options = (one for one in _options(space, tried) if one not in known and space.allows(one))
    return next(options, None)


def best_tried(*, space: Space, tried: Sequence[Tried]) -> Tried:
    """Return the fastest trial, or the plan's answer where it is within `GAIN` of that."""
    best = min(tried, key=lambda one: one.median_seconds)
    for one in tried:
        is_near = one.median_seconds <= best.median_seconds * (1 + GAIN)
        if one.decision == space.seed and is_near:
            return one
    return best


def is_clearly_worse(seconds: Sequence[float], best_seconds: float) -> bool:
    """Return whether a trial need not be measured to its end.

    Args:
        seconds: of its steps so far.
        best_seconds: the median of the best trial.
    """
    return len(seconds) >= PRUNE_AFTER and min(seconds) > best_seconds * (1 + PRUNE_MARGIN)


def _options(space: Space, tried: Sequence[Tried]) -> Iterator[Decision]:
    """Yield decisions worth trying, best first; some may have been tried already."""
    best = min(tried, key=lambda one: one.median_seconds)
    same = [one for one in tried if one.decision.strategy == best.decision.strategy]
    forward = {d: statistics.median(s) for d, s in _by_degree(same, "forward").items()}
    backward = {d: statistics.median(s) for d, s in _by_degree(same, "backward").items()}
    own = replace(
        best.decision,
        forward_degree=min(forward, key=forward.__getitem__),
        backward_degree=min(backward, key=backward.__getitem__),
    )
    ahead = _best_opening(forward, space.forward, space.seed.forward_degree)
    back = _best_opening(backward, space.backward, space.seed.backward_degree)
    wanted_seconds = GAIN * best.median_seconds
    if ahead.gain_seconds + back.gain_seconds >= wanted_seconds:
        moved = own
        if ahead.gain_seconds >= wanted_seconds / 2:
            moved = replace(moved, forward_degree=ahead.degree)
        if back.gain_seconds >= wanted_seconds / 2:
            moved = replace(moved, backward_degree=back.degree)
        yield moved
        yield replace(moved, forward_degree=own.forward_degree)
        yield replace(moved, backward_degree=own.backward_degree)
    yield own
    yield space.fitting(own)
    for strategy in space.strategies:
        yield space.fitting(replace(own, strategy=strategy))


def _by_degree(tried: Sequence[Tried], phase: Phase) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for one in tried:
        if phase == "forward":
            found.setdefault(one.decision.forward_degree, []).extend(one.forward_seconds)
        else:
            found.setdefault(one.decision.backward_degree, []).extend(one.backward_seconds)
    return found


def _best_opening(curve: _Curve, degrees: Degrees, seed: int) -> _Opening:
    """Return the opening that promises most, then the nearest to the best degree."""
    best = min(curve, key=curve.__getitem__)
    openings = [
        *_between(curve),
        *_outside(curve, degrees[1], best, seed, sign=1),
        *_outside(curve, degrees[0], best, seed, sign=-1),
    ]
    nothing = _Opening(degree=best, gain_seconds=0.0)
    return max(
        (nothing, *openings),
        key=lambda one: (one.gain_seconds, -abs(one.degree - best), one.degree),
    )


def _between(curve: _Curve) -> Iterator[_Opening]:
    tried = sorted(curve)
    for at, (low, high) in enumerate(pairwise(tried)):
        inside = range(low + 1, high)
        if not inside:
            continue
        left = tried[at - 1] if at else None
        right = tried[at + 2] if at + 2 < len(tried) else None
        bounds = [
            max(_line(curve, left, low, degree), _line(curve, right, high, degree))
            for degree in inside
        ]
        gain_seconds = min(curve.values()) - min(bounds)
        yield _Opening(degree=(low + high) // 2, gain_seconds=gain_seconds)


def _outside(curve: _Curve, limit: int, best: int, seed: int, *, sign: int) -> Iterator[_Opening]:
    """Yield the degrees above all tried ones, or below them.

    Above, the bound is taken at twice the last degree. A pipeline of r chunks exposes C/r and pays
    B·r for starting them; more chunks save at most (√(C/r) − √(B·r))², which is less than the
    tangent saves at 2·r, C/r − B·r.

    Args:
        limit: the last degree to try.
        sign: 1 above, -1 below.
    """
    tried = sorted(curve, key=lambda degree: sign * degree)
    last, before = tried[-1], tried[-2] if len(tried) > 1 else None
    if sign * last >= sign * limit:
        return
    ends = (last + sign, min(2 * last, limit) if sign > 0 else limit)
    bound = min(_line(curve, before, last, degree) for degree in ends)
    step = max(1, last // 4)  # neighbours of a large degree differ by noise alone
    if before is not None and best == last != seed:
        step = 2 * abs(last - before)
    step = min(step, abs(limit - last))
    yield _Opening(degree=last + sign * step, gain_seconds=curve[best] - bound)


def _line(curve: _Curve, far: int | None, near: int, degree: int) -> float:
    """Return the line through two tried degrees at a third one, −∞ where one is missing."""
    if far is None:
        return -math.inf
    slope = (curve[near] - curve[far]) / (near - far)
    return curve[near] + slope * (degree - near)
