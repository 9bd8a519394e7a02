"""Search during training: settled batch sizes, decisions to try for a new size, and when to stop.

Times are convex in the degree, except for noise: lines through tried degrees bound other gains.

Algorithm 1 of MPipeMoE keeps one range for each degree and merges every new size into it. If the
best degree does not grow steadily with the batch, such a range swallows other ranges. Here only
settled sizes are stored, and ranges follow from them: neighbours with equal decisions form a range,
and a size that contradicts a range splits it.
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from moetune.domain.constraints import STRATEGIES, Strategy
from moetune.domain.plan import Decision, Plan
from moetune.solve.layer.choose import HOPELESS
from moetune.solve.layer.memory import MemoryBudget

REACH = 1 / 16
"""Share by which a size may differ from a settled size and still take its decision.

Without it a job whose batches all differ would search for each of them.
"""


class AdaptiveRanges:
    """Settled decisions by tokens. Never changed in place.

    A size between two settled sizes with equal decisions takes their decision. Any other size takes
    that of the nearer settled size, if it is within reach.

    Args:
        settled: decisions by the number of tokens that they were chosen for.
        reach: see `REACH`; 0 for the ranges of the paper.

    Attributes:
        violations: number of neighbours whose degree falls as the tokens grow.
    """

    def __init__(
        self, settled: Mapping[int, Decision] = MappingProxyType({}), *, reach: float = REACH
    ) -> None:
        self._settled = dict(sorted(settled.items()))
        self._sizes = list(self._settled)
        self._reach = reach
        self.violations = sum(
            below.degree > above.degree for below, above in pairwise(self._settled.values())
        )

    def decide(self, tokens: int) -> Decision | None:
        """Return the decision settled for `tokens`; None in a gap."""
        settled = self._settled.get(tokens)
        if settled is not None or not self._sizes:
            return settled
        place = bisect_left(self._sizes, tokens)
        near = self._sizes[max(place - 1, 0) : place + 1]  # the settled sizes around it
        below, above = near[0], near[-1]
        if below < tokens < above and self._settled[below] == self._settled[above]:
            return self._settled[below]
        nearer = below if tokens <= (below + above) // 2 else above
        return self._settled[nearer] if self.is_near(tokens, nearer) else None

    def around(self, tokens: int) -> tuple[Decision, ...]:
        """Return the decisions of the settled sizes below and above; () if outside them."""
        place = bisect_left(self._sizes, tokens)
        if not 0 < place < len(self._sizes):
            return ()
        return self._settled[self._sizes[place - 1]], self._settled[self._sizes[place]]

    def settle(self, tokens: int, decision: Decision) -> "AdaptiveRanges":
        """Return the ranges with an additional size; a size keeps its newest decision."""
        return AdaptiveRanges({**self._settled, tokens: decision}, reach=self._reach)

    def is_near(self, tokens: int, size: int) -> bool:
        """Return whether `tokens` are within reach of `size`."""
        return math.ceil(size / (1 + self._reach)) <= tokens <= size * (1 + self._reach)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Degrees and strategies to try.

    Args:
        seed: the plan's answer, within the degrees; tried first and always allowed.
        degrees: the smallest and the largest degree, both included.
        strategies: the most promising first.
        budget: memory at the largest number of tokens that the decision will hold for; None: no
            limit.
    """

    seed: Decision
    degrees: tuple[int, int]
    strategies: tuple[Strategy, ...]
    budget: MemoryBudget | None

    @property
    def is_single(self) -> bool:
        """Whether the seed is the only decision."""
        smallest, largest = self.degrees
        return smallest == largest and self.strategies in ((), (self.seed.strategy,))

    def allows(self, decision: Decision) -> bool:
        """Return whether the decision is within the degrees and fits in memory."""
        if decision == self.seed:
            return True
        is_inside = self.degrees[0] <= decision.degree <= self.degrees[1]
        return is_inside and decision.strategy in self.strategies and fits(self.budget, decision)

    def fitting(self, decision: Decision) -> Decision:
        """Return the decision with the fewest added chunks that make it fit, else unchanged."""
        smallest, largest = self.degrees
        more = map(decision.with_degree, range(max(decision.degree, smallest), largest + 1))
        return next(filter(self.allows, more), decision)


def search_space(
    *, plan: Plan, tokens_per_rank: int, around: Sequence[Decision], memory_reuse: Strategy | None
) -> Space:
    """Return the degrees and strategies within the caller's pins and the memory.

    A strategy that reuses memory only adds work, so "none" is the only strategy if it fits.
    Otherwise strategies that the plan predicts as hopeless are left out. Between two settled sizes
    only the degrees between theirs are tried. Outside them any degree is, as the best may not grow.

    Args:
        around: decisions of the settled sizes below and above, or none.
        memory_reuse: the strategy that the layer is pinned to, None to choose it.
    """
    bounds, answer = plan.inputs.pinned.bounds, plan.decide(tokens_per_rank)
    most = bounds.largest(tokens_per_rank)
    ends = [min(decision.degree, most) for decision in around] or [1, most]
    if bounds.degree is not None:
        ends = [bounds.degree]
    smallest, largest = min(ends), max(ends)
    seed = replace(
        answer.with_degree(min(max(answer.degree, smallest), largest)),
        strategy=memory_reuse or answer.strategy,
        kernel=None,  # the layer adds the plan's kernel to each trial
    )
    budget = _budget(plan, math.floor(tokens_per_rank * (1 + REACH)))
    is_pinned = memory_reuse is not None or "strategy" in plan.inputs.constraints
    strategies = (seed.strategy,) if is_pinned else _strategies(plan, seed, budget, around)
    if plan.workload.expert_parallel == "tensor":
        strategies = ("none",)
    return Space(seed=seed, degrees=(smallest, largest), strategies=strategies, budget=budget)


def _strategies(
    plan: Plan, seed: Decision, budget: MemoryBudget | None, around: Sequence[Decision]
) -> tuple[Strategy, ...]:
    """Return the strategies that the plan does not predict as hopeless, the fastest first."""
    if fits(budget, replace(seed.with_degree(2), strategy="none")):
        return ("none",)
    among = STRATEGIES
    if around:
        near = {seed.strategy, *(decision.strategy for decision in around)}
        among = tuple(strategy for strategy in STRATEGIES if strategy in near)
    step_seconds = plan.predicted.step_seconds
    ratios = dict.fromkeys(among, 1.0)
    for row in plan.terms.strategies if plan.terms and step_seconds else ():
        ratios[row.strategy] = row.step_seconds / step_seconds
    promising = (strategy for strategy in among if ratios[strategy] <= HOPELESS)
    return tuple(sorted(promising, key=ratios.__getitem__))


def _budget(plan: Plan, tokens_per_rank: int) -> MemoryBudget | None:
    """Return the memory budget: the recorded limit, else the plan's memory if it was binding."""
    limit = plan.inputs.memory_limit_bytes
    if limit is not None:
        limit -= plan.inputs.pinned.memory_taken_bytes
    elif plan.decision.binding == "memory" or plan.memory.strategy != "none":
        limit = plan.memory.device_bytes
    else:
        return None
    return MemoryBudget(
        workload=replace(plan.workload, tokens_per_rank=tokens_per_rank), limit_bytes=limit,
        is_grouped=plan.workload.dtype == "bfloat16",  # a GPU's grouped kernel takes more
    )  # fmt: skip


def fits(budget: MemoryBudget | None, decision: Decision) -> bool:
    """Return whether a layer's peak is within its memory; None for no limit."""
    return budget is None or budget.fits(strategy=decision.strategy, degree=decision.degree)


GAIN = 0.01
"""Least gain, as a share of a step, that continues the search or replaces the plan's answer."""
REPEATS = 4
"""Number of measured steps in a trial."""
PRUNE_AFTER = 2
PRUNE_MARGIN = 0.05
"""A trial ends early if its fastest step exceeds the best trial's median by this share."""
MAX_TRIALS = 16
"""Most trials for one number of tokens; it limits the search if noise hides convexity."""

_Curve = Mapping[int, float]
"""Seconds by degree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A trial: times of the pipelined part, both phases, in each of its measured steps."""

    decision: Decision
    seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        """The median time of the steps."""
        return statistics.median(self.seconds)


class _Opening(NamedTuple):
    """A run of untried degrees.

    Args:
        degree: the degree of the run to try.
        gain_seconds: the most that any of them can save, ∞ without a bound.
    """

    degree: int
    gain_seconds: float


def next_decision(*, space: Space, tried: Sequence[Tried]) -> Decision | None:
    """Return the next decision to try for these tokens; None if every gain is below `GAIN`."""
    if not tried:
        return space.seed
    if len(tried) >= MAX_TRIALS:
        return None
    before = {trial.decision for trial in tried}
    options = (
        option for option in _options(space, tried) if option not in before and space.allows(option)
    )
    return next(options, None)


def best_tried(*, space: Space, tried: Sequence[Tried]) -> Tried:
    """Return the fastest trial, or the plan's answer if it is within `GAIN` of the fastest."""
    best = min(tried, key=lambda trial: trial.median_seconds)
    for trial in tried:
        is_near = trial.median_seconds <= best.median_seconds * (1 + GAIN)
        if trial.decision == space.seed and is_near:
            return trial
    return best


def is_clearly_worse(seconds: Sequence[float], best_seconds: float) -> bool:
    """Return whether all first steps of a trial exceed the best median by `PRUNE_MARGIN`."""
    return len(seconds) >= PRUNE_AFTER and min(seconds) > best_seconds * (1 + PRUNE_MARGIN)


def _options(space: Space, tried: Sequence[Tried]) -> Iterator[Decision]:
    """Yield decisions worth trying, the best first; some may have been tried already."""
    best = min(tried, key=lambda trial: trial.median_seconds)
    chosen, least_seconds = best.decision, GAIN * best.median_seconds
    curve = {
        trial.decision.degree: trial.median_seconds
        for trial in tried
        if trial.decision.strategy == chosen.strategy
    }
    for opening in _openings(curve, space.degrees, space.seed.degree):
        if opening.gain_seconds >= least_seconds:
            yield chosen.with_degree(opening.degree)
    yield space.fitting(chosen)
    for strategy in space.strategies:
        yield space.fitting(replace(chosen, strategy=strategy))


def _openings(curve: _Curve, degrees: tuple[int, int], seed: int) -> list[_Opening]:
    """Return the openings by promised gain, then by nearness to the best degree."""
    best = min(curve, key=curve.__getitem__)
    openings = [
        *_between(curve),
        *_outside(curve, degrees[1], best, seed, sign=1),
        *_outside(curve, degrees[0], best, seed, sign=-1),
    ]
    return sorted(
        openings,
        key=lambda opening: (-opening.gain_seconds, abs(opening.degree - best), -opening.degree),
    )


def _between(curve: _Curve) -> Iterator[_Opening]:
    tried = sorted(curve)
    for place, (low, high) in enumerate(pairwise(tried)):
        inside = range(low + 1, high)
        if not inside:
            continue
        left = tried[place - 1] if place else None
        right = tried[place + 2] if place + 2 < len(tried) else None
        bounds = [
            max(_line(curve, left, low, degree), _line(curve, right, high, degree))
            for degree in inside
        ]
        gain_seconds = min(curve.values()) - min(bounds)
        yield _Opening(degree=(low + high) // 2, gain_seconds=gain_seconds)


def _outside(curve: _Curve, limit: int, best: int, seed: int, *, sign: int) -> Iterator[_Opening]:
    """Yield the opening above all tried degrees, or below them.

    Above, the bound is taken at twice the last degree. A pipeline of r chunks exposes C/r and pays
    B·r for starting them. More chunks save at most (√(C/r) − √(B·r))². That is less than the
    tangent saves at 2·r, C/r − B·r.

    Args:
        sign: 1 above, -1 below.
    """
    tried = sorted(curve, key=lambda degree: sign * degree)
    last, before = tried[-1], tried[-2] if len(tried) > 1 else None
    if sign * last >= sign * limit:
        return
    ends = (last + sign, min(2 * last, limit) if sign > 0 else limit)
    bound = min(_line(curve, before, last, degree) for degree in ends)
    step = max(1, last // 4)  # neighbours of a large degree differ only by noise
    if before is not None and best == last != seed:
        step = 2 * abs(last - before)
    step = min(step, abs(limit - last))
    yield _Opening(degree=last + sign * step, gain_seconds=curve[best] - bound)


def _line(curve: _Curve, far: int | None, near: int, degree: int) -> float:
    """Return the value at a third degree of the line through two tried degrees; −∞ without both."""
    if far is None:
        return -math.inf
    slope = (curve[near] - curve[far]) / (near - far)
    return curve[near] + slope * (degree - near)
