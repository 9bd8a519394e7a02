"""The interface of the tuner that searches while a job trains, and the text of its results."""

from dataclasses import dataclass
from typing import Protocol

from moetune.domain.constraints import Strategy
from moetune.domain.plan import Decision, Plan
from moetune.domain.records import Settled
from moetune.domain.units import format_chunks, format_seconds
from moetune.solve.layer.online import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTask:
    """A search for the best decision for a number of tokens and a `memory_reuse`."""

    plan: Plan
    tokens_per_rank: int
    memory_reuse: Strategy | None
    space: Space


class Tuner(Protocol):
    """A search on the group's first rank, one task at a time; `tell` is as in Optuna.

    `begin` and `tell` return the next decision to try, which may repeat the last decision, or the
    search's result.
    """

    def begin(self, task: TuningTask) -> Decision | Settled:
        """Begin a search, or continue an earlier search for the same task."""

    def tell(self, seconds: float) -> Decision | Settled:
        """Report the time of one call's pipelined part, both phases, on the slowest rank."""


def outcome(settled: Settled, num_trials: int, *, violations: int) -> str:
    """Return a text of the decision.

    Args:
        violations: number of times that the degree falls as the tokens grow.
    """
    decision, saved_seconds = settled.decision, settled.planned_seconds - settled.median_seconds
    chunks = format_chunks(decision.forward_degree, decision.backward_degree)
    gain = "as fast as the plan"
    if saved_seconds > 0:
        share = 100 * saved_seconds / settled.median_seconds
        gain = f"{format_seconds(saved_seconds)} ({share:.1f} %) faster than the plan"
    doubts = f"; the degree falls with tokens {violations} times" if violations else ""
    return (
        f"{settled.tokens_per_rank:,} tokens: search settled after {num_trials} trials: "
        f"{chunks}, strategy {decision.strategy}; {gain}{doubts}"
    )
