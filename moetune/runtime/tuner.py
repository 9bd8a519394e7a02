"""What searches for an online plan book: the protocol, its task, and a line about the outcome."""

from dataclasses import dataclass
from typing import Protocol

from moetune.domain.plan import Decision, Plan
from moetune.domain.plan_inputs import Strategy
from moetune.domain.records import Settled
from moetune.solve.space import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to search for.

    Args:
        memory_reuse: the strategy that the layer is told to use, None where it is free.
    """

    plan: Plan
    tokens_per_rank: int
    memory_reuse: Strategy | None
    space: Space


class Tuner(Protocol):
    """Searches, one task at a time. It lives on the group's first rank.

    It answers with what to run next, the same as before to run it again, or with what it
    decided.
    """

    def begin(self, task: Task) -> Decision | Settled:
        """Begin a search, or go on with one of the same task that was left."""
        ...

    def tell(self, forward_seconds: float, backward_seconds: float) -> Decision | Settled:
        """Take the times of one call's pipelined part on the slowest rank."""
        ...


def describe(settled: Settled, *, violations: int) -> str:
    """Return one line for the log.

    Args:
        violations: see `moetune.solve.adaptive`.
    """
    decision = settled.decision
    faster = settled.planned_seconds / settled.median_seconds - 1
    gain = "as planned" if faster <= 0 else f"{faster:.1%} faster than planned"
    doubt = f"; degrees fall with tokens {violations} times" if violations else ""
    return (
        f"{settled.tokens_per_rank:,} tokens: {decision.forward_degree} and "
        f"{decision.backward_degree} chunks, strategy {decision.strategy}; "
        f"{settled.num_steps} steps searched, {gain}{doubt}"
    )
