"""The decisions that an online search may try for one number of tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moetune.domain.constraints import STRATEGIES, Strategy
from moetune.domain.layer import Phase, Workload
from moetune.domain.plan import Decision, Plan
from moetune.solve.layer.choose import HOPELESS
from moetune.solve.layer.memory import device_bytes
from moetune.solve.layer.peak import peak_bytes
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
    )


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
    if workload.expert_parallel == "tensor":
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
    return _promising(plan, among)


def _promising(plan: Plan, among: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Return the strategies that are not hopeless by what the plan predicts, the fastest first.

    What it does not predict counts as being as fast as its own.
    """
    step_seconds = plan.predicted.step_seconds
    ratios = dict.fromkeys(among, 1.0)
    for row in plan.terms.strategies if plan.terms and step_seconds else ():
        ratios[row.strategy] = row.step_seconds / step_seconds
    return tuple(sorted((one for one in among if ratios[one] <= HOPELESS), key=ratios.__getitem__))


def limit_of(plan: Plan) -> int | None:
    """Return the memory limit; where it bound the plan but is not recorded, the plan's memory."""
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
        is_grouped=workload.dtype == "bfloat16",  # as on a GPU, where it takes more
    )
    return peak.device_bytes <= limit_bytes
