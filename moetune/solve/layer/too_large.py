"""Alternatives to a layer that does not fit: other chunks, fewer tokens, more ranks."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moetune.domain.constraints import Strategy
from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.layout import divisors
from moetune.domain.units import format_bytes
from moetune.solve.layer.budget import Degrees, MemoryBudget
from moetune.solve.layer.choose import DegreeChooser
from moetune.solve.layer.peak import Peak
from moetune.solve.layer.words import count_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    strategy: Strategy
    degrees: Degrees
    peak: Peak

    @property
    def num_bytes(self) -> int:
        return self.peak.device_bytes


def too_large(
    budget: MemoryBudget, allowed: Sequence[Strategy], chooser: DegreeChooser
) -> InfeasiblePlanError:
    """Return the error of a layer that fits with no allowed strategy, and what would fit.

    Args:
        chooser: of any strategy, for its bounds.
    """
    smallest = _smallest(budget, allowed, chooser, budget.workload.tokens_per_rank)
    peak, degrees = smallest.peak, smallest.degrees
    return InfeasiblePlanError(
        f"memory binds: the smallest plan ({degrees[0]} and {count_chunks(degrees[1])}, strategy "
        f"{smallest.strategy}) peaks at {format_bytes(peak.device_bytes)} per device "
        f"(states {format_bytes(peak.state_bytes)}, activations "
        f"{format_bytes(peak.activation_bytes)}, buffers "
        f"{format_bytes(peak.buffer_bytes + peak.ring_bytes + peak.routing_bytes)}), "
        f"{format_bytes(peak.device_bytes - budget.limit_bytes)} more than the limit of "
        f"{format_bytes(budget.limit_bytes)}",
        _what_would_fit(budget, smallest, allowed, chooser),
    )


def _smallest(
    budget: MemoryBudget, allowed: Sequence[Strategy], chooser: DegreeChooser, tokens: int
) -> _Choice:
    """Return the plan with the smallest peak; of equal ones that with the least work."""
    choices = []
    for strategy in allowed:
        degrees = replace(chooser, strategy=strategy, budget=budget).least(tokens)
        peak = budget.peak(strategy=strategy, degrees=degrees, tokens=tokens)
        choices.append(_Choice(strategy=strategy, degrees=degrees, peak=peak))
    return min(choices, key=lambda choice: choice.num_bytes)


def _what_would_fit(
    budget: MemoryBudget, smallest: _Choice, allowed: Sequence[Strategy], chooser: DegreeChooser
) -> str:
    planned = budget.workload.tokens_per_rank
    bounds = replace(chooser.bounds, forward_degree=None, backward_degree=None, strategy=None)
    if bounds != chooser.bounds:
        free = replace(chooser, bounds=bounds)
        nearest: tuple[Strategy, ...] = ("none", "S4")  # least work first, then least memory
        for strategy in nearest[:1] if budget.keeps_all else nearest:
            choice = _smallest(budget, [strategy], free, planned)
            if choice.num_bytes <= budget.limit_bytes:
                chunks = f"{choice.degrees[0]} and {count_chunks(choice.degrees[1])}"
                return f"nearest: {chunks} with strategy {strategy}"
    most = bisect_left(
        range(1, planned), True,  # noqa: FBT003 - looked for, no switch
        key=lambda tokens: _smallest(budget, allowed, chooser, tokens).num_bytes
        > budget.limit_bytes,
    )  # fmt: skip
    if most >= 1:
        return f"nearest: {most} tokens per rank instead of {planned}"
    return _ranks_that_fit(budget, smallest)


def _ranks_that_fit(budget: MemoryBudget, smallest: _Choice) -> str:
    """Return the fewest ranks with which so many tokens fit."""
    workload = budget.workload
    for ranks in divisors(workload.layer.num_experts):
        there = replace(budget, workload=replace(workload, world_size=ranks))
        if ranks > workload.world_size and there.fits(
            strategy=smallest.strategy, degrees=smallest.degrees
        ):
            return f"no number of tokens fits; it does on {ranks} ranks (--world-size {ranks})"
    return "no number of tokens fits: allow more memory, or take a smaller layer"
