"""The tuner of a search in training, the time that it may lose, and the words on its results."""

import math
from dataclasses import dataclass
from typing import Protocol

from moetune.domain.constraints import Strategy
from moetune.domain.errors import InputError
from moetune.domain.plan import Decision, Plan
from moetune.domain.records import Settled
from moetune.domain.units import format_chunks, format_seconds
from moetune.solve.layer.online import Space

BUDGET_SECONDS = 36.0
"""A hundredth of an hour, for all searches of one job together."""


@dataclass(slots=True, kw_only=True)
class LostTime:
    """A budget of lost time, and what is lost of it.

    A step loses, for each of the layers' calls, what the call's pipelined part takes longer on the
    slowest rank than the median of the best trial before it. A step that is faster gives nothing
    back, and the first trial, of the plan, loses nothing. Steps that warm up count.

    Args:
        budget_seconds: at least 0; infinity for no bound.

    Raises:
        InputError: the budget is below 0 or no number.
    """

    budget_seconds: float = BUDGET_SECONDS
    lost_seconds: float = 0.0

    def __post_init__(self) -> None:
        if math.isnan(self.budget_seconds) or self.budget_seconds < 0:
            raise InputError(f"search_budget_seconds must be at least 0, got {self.budget_seconds}")

    @property
    def is_spent(self) -> bool:
        """Whether more is lost than the budget."""
        return self.lost_seconds > self.budget_seconds

    def charge(self, *, call_seconds: float, best_seconds: float | None, num_calls: int) -> None:
        """Count one step.

        Args:
            call_seconds: the mean of its calls, forward and backward.
            best_seconds: the same with the best decision known; None before the first one.
        """
        if best_seconds is not None:
            self.lost_seconds += num_calls * max(0.0, call_seconds - best_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTask:
    """A search for the best decision for one number of tokens and `memory_reuse`."""

    plan: Plan
    tokens_per_rank: int
    memory_reuse: Strategy | None
    space: Space


class Tuner(Protocol):
    """A search on the group's first rank, one task at a time; `tell` is as in Optuna.

    `begin` and `tell` return the next decision to try, which may be the last one again, or the
    search's result.
    """

    def begin(self, task: TuningTask) -> Decision | Settled:
        """Begin a search, or continue an unfinished one of the same task."""

    def tell(self, seconds: float) -> Decision | Settled:
        """Report the time of one call's pipelined part, both phases, on the slowest rank."""

    def best_seconds(self) -> float | None:
        """Return the median of the fastest trial that has ended, None before the first one."""

    def settle(self) -> Settled:
        """End the search with the best decision that was tried; at least one trial has ended."""


def outcome(
    settled: Settled,
    num_trials: int,
    lost_seconds: float,
    *,
    budget_seconds: float | None,
    violations: int,
) -> str:
    """Return what was decided, in words.

    Args:
        budget_seconds: where it ended the search, else None.
        violations: how often the degree falls as the tokens grow.
    """
    decision, saved_seconds = settled.decision, settled.planned_seconds - settled.median_seconds
    ended = "settled" if budget_seconds is None else "stopped"
    why = "" if budget_seconds is None else f" beyond its {format_seconds(budget_seconds)}"
    chunks = format_chunks(decision.forward_degree, decision.backward_degree)
    what = f"{chunks}, strategy {decision.strategy}"
    gain = "as fast as the plan"
    if saved_seconds > 0:
        share = 100 * saved_seconds / settled.median_seconds
        gain = f"{format_seconds(saved_seconds)} ({share:.1f} %) faster than the plan"
    doubts = f"; the degree falls with tokens {violations} times" if violations else ""
    return (
        f"{settled.tokens_per_rank:,} tokens: search {ended} after {num_trials} trials: "
        f"{what}; {gain}, lost {format_seconds(lost_seconds)}{why}{doubts}"
    )
