"""Sizes that an online search has settled, and the decisions that it may try for another one.

Algorithm 1 of MPipeMoE keeps one range for each degree and merges every new size into it. Where
the best degree does not only grow with the batch, such a range swallows those of others. Here only
settled sizes are stored, and the ranges follow from them: neighbours with equal decisions are one
range, and a size that contradicts a range splits it.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

from moetune.domain.constraints import DISPATCHERS, STRATEGIES, Dispatcher, Strategy
from moetune.domain.layer import Phase, Workload
from moetune.domain.plan import Decision, Plan
from moetune.solve.layer.memory import device_bytes
from moetune.solve.layer.peak import peak_bytes
from moetune.solve.layer.promising import promising_dispatchers, promising_strategies

REACH = 1 / 16
"""A decision holds for sizes that are larger or smaller by up to this share.

Without it a job whose batches all differ would search for each of them.
"""

Span = tuple[int, int, Decision]
"""(low_tokens, high_tokens, decision), both ends included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The settled decisions below and above an unsettled size; None beyond the outermost ones."""

    below: Decision | None = None
    above: Decision | None = None

    def degrees(self, phase: Phase, largest: int) -> tuple[int, int]:
        """Return the smallest and the largest degree to try.

        Between two settled sizes only the degrees between theirs; beyond the outermost one
        any, since the best degree need not grow.

        Args:
            largest: the largest degree allowed at all.
        """
        if self.below is None or self.above is None:
            return 1, largest
        ends = [
            one.forward_degree if phase == "forward" else one.backward_degree
            for one in (self.below, self.above)
        ]
        return min(*ends, largest), min(max(ends), largest)


class AdaptiveRanges:
    """Settled decisions by tokens, and the disjoint ranges that follow. Never changed in place.

    Args:
        settled: decisions by the number of tokens that they were found for.
        reach: see `REACH`; 0 for the paper's own ranges.

    Attributes:
        spans: the ranges, ascending; sizes between two of them are not settled.
        violations: number of neighbours whose degrees fall as the tokens grow.
    """

    def __init__(
        self,
        settled: Mapping[int, Decision] = MappingProxyType({}),
        *,
        reach: float = REACH,
    ) -> None:
        self._settled = dict(sorted(settled.items()))
        self._sizes = list(self._settled)
        self._reach = reach
        self.spans = self._spans()
        self._lows = [low for low, _, _ in self.spans]
        self.violations = sum(
            below.forward_degree > above.forward_degree
            or below.backward_degree > above.backward_degree
            for below, above in pairwise(self._settled.values())
        )

    def decide(self, tokens: int) -> Decision | None:
        """Return the decision settled for so many tokens; None in a gap.

        A dictionary in front, a bisection behind: O(log n) for n ranges.
        """
        if tokens in self._settled:
            return self._settled[tokens]
        index = bisect_right(self._lows, tokens) - 1
        if index < 0 or tokens > self.spans[index][1]:
            return None
        return self.spans[index][2]

    def gap(self, tokens: int) -> Gap | None:
        """Return the gap that so many tokens lie in; None where a decision holds."""
        if self.decide(tokens) is not None:
            return None
        at = bisect_left(self._sizes, tokens)
        return Gap(
            below=self._settled[self._sizes[at - 1]] if at else None,
            above=self._settled[self._sizes[at]] if at < len(self._sizes) else None,
        )

    def settle(self, tokens: int, decision: Decision) -> "AdaptiveRanges":
        """Return the ranges with one size more; the newest decision for a size holds."""
        return AdaptiveRanges({**self._settled, tokens: decision}, reach=self._reach)

    def is_near(self, tokens: int, size: int) -> bool:
        """Return whether `tokens` are within reach of `size`."""
        return self._low(size) <= tokens <= self._high(size)

    def _spans(self) -> tuple[Span, ...]:
        spans: list[Span] = []
        previous = 0
        for size, decision in self._settled.items():
            low, high = self._low(size), self._high(size)
            if spans and spans[-1][2] == decision:
                spans[-1] = spans[-1][0], high, decision
            else:
                if spans:
                    middle = (previous + size) // 2
                    before = spans[-1]
                    spans[-1] = before[0], min(before[1], middle), before[2]
                    low = max(low, middle + 1)
                spans.append((low, high, decision))
            previous = size
        return tuple(spans)

    def _low(self, size: int) -> int:
        return math.ceil(size / (1 + self._reach))

    def _high(self, size: int) -> int:
        return math.floor(size * (1 + self._reach))


Degrees = tuple[int, int]
"""(smallest, largest), both included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Degrees, strategies and dispatchers to try.

    Args:
        seed: the plan's answer, within the degrees; tried first and always allowed.
        strategies: the most promising first.
        dispatchers: beside the seed's, the most promising first.
        workload: at the largest number of tokens that the decision will hold for.
        limit_bytes: memory on one device, None without a limit.
    """

    seed: Decision
    forward: Degrees
    backward: Degrees
    strategies: tuple[Strategy, ...]
    workload: Workload
    limit_bytes: int | None
    dispatchers: tuple[Dispatcher, ...] = ()

    @property
    def runnable(self) -> tuple[Dispatcher, ...]:
        """The seed's dispatcher, and the others."""
        return (self.seed.dispatcher, *self.dispatchers)

    @property
    def is_single(self) -> bool:
        """Whether the seed is the only decision."""
        sizes = (self.forward[1] - self.forward[0], self.backward[1] - self.backward[0])
        is_one = self.strategies in ((), (self.seed.strategy,)) and not self.dispatchers
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
            and decision.dispatcher in self.runnable
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
    *,
    plan: Plan,
    tokens_per_rank: int,
    gap: Gap,
    memory_reuse: Strategy | None,
    can_relay: bool = False,
) -> Space:
    """Return the degrees, strategies and dispatchers within the caller's pins and the memory.

    A strategy that reuses memory only adds work, so where "none" fits it is the only one. Of the
    others, and of the dispatchers, those are left out that the plan predicts as hopeless.

    Args:
        memory_reuse: the strategy that the layer is pinned to, None to choose it.
        can_relay: whether the layer's rows can travel across its nodes, then inside them.
    """
    bounds = plan.inputs.pinned.bounds
    largest = bounds.largest(tokens_per_rank)
    forward, backward = (
        _degrees(gap, phase, largest, bounds.pinned(phase)) for phase in ("forward", "backward")
    )
    answer = plan.decide(tokens_per_rank)
    seed = replace(
        answer,
        forward_degree=_clip(answer.forward_degree, forward),
        backward_degree=_clip(answer.backward_degree, backward),
        strategy=memory_reuse or answer.strategy,
    )
    reached = math.floor(tokens_per_rank * (1 + REACH))
    workload = replace(plan.workload, tokens_per_rank=reached)
    limit_bytes = limit_of(plan)
    return Space(
        seed=seed,
        forward=forward,
        backward=backward,
        strategies=_strategies(plan, seed, gap, memory_reuse, workload, limit_bytes),
        workload=workload,
        limit_bytes=limit_bytes,
        dispatchers=_dispatchers(plan, seed, tokens_per_rank, can_relay=can_relay),
    )


def _dispatchers(
    plan: Plan, seed: Decision, tokens_per_rank: int, *, can_relay: bool
) -> tuple[Dispatcher, ...]:
    """Return the dispatchers beside the seed's."""
    is_pinned = plan.inputs.pinned.bounds.dispatcher is not None
    is_flat = plan.workload.expert_parallel == "tensor" or plan.workload.quantization
    if not can_relay or is_pinned or is_flat:
        return ()
    others = [one for one in DISPATCHERS if one != seed.dispatcher]
    return promising_dispatchers(plan, tokens_per_rank, others)


def _degrees(gap: Gap, phase: Phase, largest: int, pinned: int | None) -> Degrees:
    if pinned is not None:
        return pinned, pinned
    return gap.degrees(phase, largest)


def _clip(degree: int, degrees: Degrees) -> int:
    return min(max(degree, degrees[0]), degrees[1])


def _strategies(
    plan: Plan,
    seed: Decision,
    gap: Gap,
    memory_reuse: Strategy | None,
    workload: Workload,
    limit_bytes: int | None,
) -> tuple[Strategy, ...]:
    if workload.expert_parallel == "tensor" or workload.quantization:
        return ("none",)
    if memory_reuse is not None or "strategy" in plan.inputs.constraints:
        return (seed.strategy,)
    pipelined = replace(seed, forward_degree=2, backward_degree=2, strategy="none")
    if fits(workload, limit_bytes, pipelined):
        return ("none",)
    among = STRATEGIES
    if gap.below is not None and gap.above is not None:
        near = {seed.strategy, gap.below.strategy, gap.above.strategy}
        among = tuple(one for one in STRATEGIES if one in near)
    return promising_strategies(plan, math.floor(workload.tokens_per_rank / (1 + REACH)), among)


def limit_of(plan: Plan) -> int | None:
    """Return the memory limit; where it bound the plan but is not recorded, the plan's memory.

    A layer in a whole model fits as planned, and plans record no limit for it: None.
    """
    if plan.transformer is not None:
        return None
    if plan.inputs.memory_limit_bytes is not None:
        return plan.inputs.memory_limit_bytes - plan.inputs.pinned.memory_taken_bytes
    is_forced = plan.decision.binding == "memory" or plan.memory.strategy != "none"
    return device_bytes(plan.memory) if is_forced else None


def fits(workload: Workload, limit_bytes: int | None, decision: Decision) -> bool:
    """Return whether a layer's peak is within a limit; None for no limit."""
    if limit_bytes is None:
        return True
    peak = peak_bytes(
        workload=workload,
        forward_degree=decision.forward_degree,
        backward_degree=decision.backward_degree,
        strategy=decision.strategy,
        dispatcher=decision.dispatcher,
        is_grouped=workload.dtype == "bfloat16",  # as on a GPU, where it takes more
    )
    return peak.device_bytes <= limit_bytes
