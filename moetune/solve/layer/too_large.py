"""Alternatives to a layer that does not fit: other chunks, fewer tokens, more ranks."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from moetune.domain.constraints import Strategy
from moetune.domain.errors import InfeasiblePlanError
from moetune.domain.layout import divisors
from moetune.domain.units import format_bytes
from moetune.solve.layer.budget import Degrees, MemoryBudget
from moetune.solve.layer.choose import DegreeChooser
from moetune.solve.layer.peak import Peak
from moetune.solve.layer.words import count_chunks


class _Choice(NamedTuple):
    strategy: Strategy
    degrees: Degrees
    peak: Peak

    @property
    def words(self) -> str:
        """The numbers of chunks."""
        return f"{self.degrees[0]} and {count_chunks(self.degrees[1])}"


def too_large(
    budget: MemoryBudget, allowed: Sequence[Strategy], chooser: DegreeChooser
) -> InfeasiblePlanError:
    """Return the error of a layer that fits with no allowed strategy, and what would fit.

    Args:
        chooser: of any strategy, for its bounds.
    """
    smallest = _smallest(budget, allowed, chooser, budget.workload.tokens_per_rank)
    peak = smallest.peak
    return InfeasiblePlanError(
        f"memory binds: the smallest plan ({smallest.words}, strategy "
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
        choices.append(_Choice(strategy, degrees, peak))
    return min(choices, key=lambda choice: choice.peak.device_bytes)


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
            if choice.peak.device_bytes <= budget.limit_bytes:
                return f"nearest: {choice.words} with strategy {strategy}"
    most = bisect_left(
        range(1, planned), True,  # noqa: FBT003 - looked for, no switch
        key=lambda tokens: _smallest(budget, allowed, chooser, tokens).peak.device_bytes
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
