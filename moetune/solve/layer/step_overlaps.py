"""Overlaps of two batches that a search in training may try, and what it makes of their times."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moetune.domain.plan import Decision, Plan
from moetune.domain.training import StepOverlap
from moetune.solve.layer.online import GAIN, REPEATS, is_clearly_worse
from moetune.solve.layer.search_space import fits, limit_of
from moetune.solve.layer.settled_ranges import REACH

Times = Mapping[StepOverlap, Sequence[float]]
"""Seconds of the measured steps by what was tried, in the order of the trials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCall:
    """A call of a layer, for so many tokens a rank, with what its plan or a search decided."""

    plan: Plan
    tokens_per_rank: int
    decision: Decision


def step_overlaps(calls: Sequence[PlannedCall]) -> tuple[StepOverlap, ...]:
    """Return the overlaps to try, that of the plan first.

    What a plan pins is not searched. Chunks are joined only where that is another decision for
    some layer, reuses no memory and fits into it.

    Args:
        calls: of the model's layers, at least one.
    """
    whole = calls[0].plan.transformer
    pinned = {one.plan.inputs.constraints.get("overlap") for one in calls} - {None}
    joins = any(map(_is_cut, calls)) and all(map(_may_join, calls))
    in_turns: tuple[StepOverlap, ...] = ("both", "batch") if joins else ("both",)
    if "batch" in pinned:
        return in_turns
    if pinned:
        return ("chunks",)
    if whole is not None and whole.batches_in_flight == 1:
        return ("chunks", *in_turns)
    return (*in_turns, "chunks")


def next_overlap(options: Sequence[StepOverlap], tried: Times) -> StepOverlap | None:
    """Return what to run in the next step; None when all is known.

    What is clearly slower than the best before it is not measured to its end.
    """
    best_seconds: float | None = None
    for one in options:
        seconds = tried.get(one, ())
        is_worse = best_seconds is not None and is_clearly_worse(seconds, best_seconds)
        if len(seconds) < REPEATS and not is_worse:
            return one
        middle = statistics.median(seconds)
        best_seconds = middle if best_seconds is None else min(best_seconds, middle)
    return None


def best_overlap(tried: Times) -> StepOverlap:
    """Return the fastest, or the plan's, which was tried first, where it is within `GAIN` of it."""
    middles = {one: statistics.median(seconds) for one, seconds in tried.items()}
    planned, best = next(iter(middles)), min(middles, key=middles.__getitem__)
    return planned if middles[planned] <= middles[best] * (1 + GAIN) else best


def _is_cut(call: PlannedCall) -> bool:
    return max(call.decision.forward_degree, call.decision.backward_degree) > 1


def _may_join(call: PlannedCall) -> bool:
    """Return whether a layer may run one chunk."""
    plan, bounds = call.plan, call.plan.inputs.pinned.bounds
    is_pinned = bounds.forward_degree is not None or bounds.backward_degree is not None
    if is_pinned or call.decision.strategy != "none":
        return False
    reached = math.floor(call.tokens_per_rank * (1 + REACH))
    whole = replace(call.decision, forward_degree=1, backward_degree=1)
    return fits(replace(plan.workload, tokens_per_rank=reached), limit_of(plan), whole)
