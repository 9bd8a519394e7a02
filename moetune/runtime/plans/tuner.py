"""The tuner of a search in training, and the words on its findings."""

from dataclasses import dataclass
from typing import Protocol

from moetune.domain.constraints import Strategy
from moetune.domain.plan import Decision, Plan
from moetune.domain.records import Settled
from moetune.domain.units import format_seconds
from moetune.solve.layer.search_space import Space


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

    def tell(self, forward_seconds: float, backward_seconds: float) -> Decision | Settled:
        """Report the times of one call's pipelined part on the slowest rank."""

    def best_seconds(self) -> float | None:
        """Return the median of the fastest trial that has ended, None before the first one."""

    def settle(self) -> Settled:
        """End the search with the best decision that was tried; at least one trial has ended."""


def outcome(
    settled: Settled, num_trials: int, lost_seconds: float, budget_seconds: float | None
) -> str:
    """Return what was decided, in words.

    Args:
        budget_seconds: where it ended the search, else None.
    """
    one, saved_seconds = settled.decision, settled.planned_seconds - settled.median_seconds
    ended = "settled" if budget_seconds is None else "stopped"
    why = "" if budget_seconds is None else f" beyond its {format_seconds(budget_seconds)}"
    what = f"{one.forward_degree} and {one.backward_degree} chunks, strategy {one.strategy}"
    gain = "as fast as the plan"
    if saved_seconds > 0:
        share = 100 * saved_seconds / settled.median_seconds
        gain = f"{format_seconds(saved_seconds)} ({share:.1f} %) faster than the plan"
    return (
        f"{settled.tokens_per_rank:,} tokens: search {ended} after {num_trials} trials: "
        f"{what}; {gain}, lost {format_seconds(lost_seconds)}{why}"
    )


def doubt(violations: int) -> str:
    """Return how often degrees fall as the tokens grow, in words."""
    return f"; degrees fall with tokens {violations} times" if violations else ""
