"""Space of a search in training: degrees and strategies within the pins and the memory."""

import math
from dataclasses import dataclass, replace

from moetune.domain.constraints import STRATEGIES, Strategy
from moetune.domain.layer import Phase, Workload
from moetune.domain.plan import Decision, Plan
from moetune.solve.layer.memory import layer_memory, total_bytes
from moetune.solve.layer.settled import REACH, Gap

Degrees = tuple[int, int]
"""(smallest, largest), both included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Degrees and strategies to try.

    Args:
        seed: what the plan answers, within the degrees; tried first and always allowed.
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
        """Whether there is nothing to choose."""
        sizes = (self.forward[1] - self.forward[0], self.backward[1] - self.backward[0])
        return not any(sizes) and self.strategies in ((), (self.seed.strategy,))

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
        return is_inside and _fits(self.workload, self.limit_bytes, decision)

    def fitting(self, decision: Decision) -> Decision:
        """Return the decision, with more chunks where it takes those for the memory."""
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
    """Return what may be tried: within the caller's pins and the memory.

    A strategy that reuses memory only adds work, so where "none" fits it is the only one.

    Args:
        memory_reuse: the strategy that the layer is told to use, None to choose it.
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
    limit_bytes = _limit(plan)
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
    if _fits(workload, limit_bytes, pipelined):
        return ("none",)
    if gap.below is None or gap.above is None:
        return STRATEGIES
    among = {seed.strategy, gap.below.strategy, gap.above.strategy}
    return tuple(one for one in STRATEGIES if one in among)


def _limit(plan: Plan) -> int | None:
    """Return the memory; where it forced the plan and its size is not told, what that needs.

    A layer in a whole model fits as planned, and its share of the limit is not told.
    """
    if plan.transformer is not None:
        return None
    if plan.inputs.memory_limit_bytes is not None:
        return plan.inputs.memory_limit_bytes - plan.inputs.pinned.memory_taken_bytes
    is_forced = plan.decision.binding == "memory" or plan.memory.strategy != "none"
    return total_bytes(plan.memory) if is_forced else None


def _fits(workload: Workload, limit_bytes: int | None, decision: Decision) -> bool:
    if limit_bytes is None:
        return True
    memory = layer_memory(
        workload=workload,
        forward_degree=decision.forward_degree,
        backward_degree=decision.backward_degree,
        strategy=decision.strategy,
    )
    return total_bytes(memory) <= limit_bytes
