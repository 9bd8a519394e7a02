"""Search in training: decisions to try for one number of tokens, the next one, and when to stop.

Times are convex in the degree but for noise, so that lines through tried degrees bound what the
others can save.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from moetune.domain.constraints import STRATEGIES, Strategy
from moetune.domain.layer import PHASES, Phase, Workload
from moetune.domain.plan import Decision, Plan
from moetune.solve.layer.choose import HOPELESS
from moetune.solve.layer.memory import MemoryBudget
from moetune.solve.layer.settled_ranges import REACH, Gap

Degrees = tuple[int, int]
"""(smallest, largest), both included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Degrees and strategies to try.

    Args:
        seed: the plan's answer, within the degrees; tried first and always allowed.
        strategies: the most promising first.
        workload: at the largest number of tokens that the decision will hold for.
        limit_bytes: memory on one device, None without a limit.
    """

    seed: Decision
    forward: Degrees
    backward: Degrees
    strategies: tuple[Strategy, ...]
    workload: Workload
    limit_bytes: int | None

    @property
    def is_single(self) -> bool:
        """Whether the seed is the only decision."""
        sizes = (self.forward[1] - self.forward[0], self.backward[1] - self.backward[0])
        is_one = self.strategies in ((), (self.seed.strategy,))
        return is_one and not any(sizes)

    def allows(self, decision: Decision) -> bool:
        """Return whether the decision is within the degrees and fits the memory."""
        if decision == self.seed:
            return True
        forward, backward = decision.forward_degree, decision.backward_degree
        is_inside = (
            self.forward[0] <= forward <= self.forward[1]
            and self.backward[0] <= backward <= self.backward[1]
            and decision.strategy in self.strategies
        )
        return is_inside and fits(self.workload, self.limit_bytes, decision)

    def fitting(self, decision: Decision) -> Decision:
        """Return the decision with the fewest chunks more that make it fit, else as it is."""
        last = max(self.forward[1], self.backward[1])
        for degree in range(1, last + 1):
            larger = replace(
                decision,
                forward_degree=_clip(max(decision.forward_degree, degree), self.forward),
                backward_degree=_clip(max(decision.backward_degree, degree), self.backward),
            )
            if self.allows(larger):
                return larger
        return decision


def search_space(
    *, plan: Plan, tokens_per_rank: int, gap: Gap, memory_reuse: Strategy | None
) -> Space:
    """Return the degrees and strategies within the caller's pins and the memory.

    A strategy that reuses memory only adds work, so where "none" fits it is the only one. Of the
    others those are left out that the plan predicts as hopeless.

    Args:
        memory_reuse: the strategy that the layer is pinned to, None to choose it.
    """
    bounds, answer = plan.inputs.pinned.bounds, plan.decide(tokens_per_rank)
    largest = bounds.largest(tokens_per_rank)
    forward, backward = (
        gap.degrees(phase, largest) if pinned is None else (pinned, pinned)
        for phase, pinned in zip(PHASES, map(bounds.pinned, PHASES), strict=True)
    )
    reached = math.floor(tokens_per_rank * (1 + REACH))
    space = Space(
        seed=replace(
            answer,
            forward_degree=_clip(answer.forward_degree, forward),
            backward_degree=_clip(answer.backward_degree, backward),
            strategy=memory_reuse or answer.strategy,
        ),
        forward=forward,
        backward=backward,
        strategies=(),
        workload=replace(plan.workload, tokens_per_rank=reached),
        limit_bytes=limit_of(plan),
    )
    is_pinned = memory_reuse is not None or "strategy" in plan.inputs.constraints
    return replace(space, strategies=_strategies(plan, space, gap, is_pinned=is_pinned))


def _clip(degree: int, degrees: Degrees) -> int:
    return min(max(degree, degrees[0]), degrees[1])


def _strategies(plan: Plan, space: Space, gap: Gap, *, is_pinned: bool) -> tuple[Strategy, ...]:
    """Return the strategies that are not hopeless by what the plan predicts, the fastest first.

    What it does not predict counts as being as fast as its own.
    """
    seed, workload = space.seed, space.workload
    if workload.expert_parallel == "tensor":
        return ("none",)
    if is_pinned:
        return (seed.strategy,)
    pipelined = replace(seed, forward_degree=2, backward_degree=2, strategy="none")
    if fits(workload, space.limit_bytes, pipelined):
        return ("none",)
    among = STRATEGIES
    if gap.below is not None and gap.above is not None:
        near = {seed.strategy, gap.below.strategy, gap.above.strategy}
        among = tuple(strategy for strategy in STRATEGIES if strategy in near)
    step_seconds = plan.predicted.step_seconds
    ratios = dict.fromkeys(among, 1.0)
    for row in plan.terms.strategies if plan.terms and step_seconds else ():
        ratios[row.strategy] = row.step_seconds / step_seconds
    promising = (strategy for strategy in among if ratios[strategy] <= HOPELESS)
    return tuple(sorted(promising, key=ratios.__getitem__))


def limit_of(plan: Plan) -> int | None:
    """Return the memory limit; where it bound the plan but is not recorded, the plan's memory."""
    if plan.inputs.memory_limit_bytes is not None:
        return plan.inputs.memory_limit_bytes - plan.inputs.pinned.memory_taken_bytes
    is_forced = plan.decision.binding == "memory" or plan.memory.strategy != "none"
    return plan.memory.device_bytes if is_forced else None


def fits(workload: Workload, limit_bytes: int | None, decision: Decision) -> bool:
    """Return whether a layer's peak is within a limit; None for no limit."""
    if limit_bytes is None:
        return True
    budget = MemoryBudget(
        workload=workload, limit_bytes=limit_bytes,
        is_grouped=workload.dtype == "bfloat16",  # as on a GPU, where it takes more
    )  # fmt: skip
    degrees = decision.forward_degree, decision.backward_degree
    return budget.fits(strategy=decision.strategy, degrees=degrees)


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
