"""The tuner of a group's first rank, asked by all ranks together, and the time that it may lose."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moetune.comm.agree import decide_on_first
from moetune.comm.group import Communicator
from moetune.domain.plan import Decision, Plan
from moetune.domain.records import Settled
from moetune.runtime.plans.lost_time import LostTime
from moetune.runtime.plans.tuner import Tuner, outcome

_LOGGER = logging.getLogger("moetune")
Measured = tuple[float, ...]
"""Of one rank and step: the mean times of its calls, and their number; () without calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the first rank's tuner says, and its account of lost time.

    Args:
        said: what to try next, or what was settled.
        is_cut: the budget ended the search.
    """

    said: Decision | Settled
    lost_seconds: float
    is_spent: bool
    is_cut: bool = False


class SharedTuner:
    """Asks the first rank's tuner, and tells all ranks what it said.

    Args:
        make_tuner: called at the first question, on the first rank only.
        budget_seconds: time that all searches together may lose, see `LostTime`; the step that
            goes beyond it ends them. The first rank's counts.
        report: called on the first rank with what was settled for a plan.

    Attributes:
        has_ended: the tuner raised, or the budget is lost.
        lost: by all searches; on other ranks than the first, as of its last answer.
    """

    def __init__(
        self,
        communicator: Communicator,
        make_tuner: Callable[[], Tuner],
        *,
        budget_seconds: float,
        report: Callable[[Plan, Settled], None] | None,
    ) -> None:
        self.communicator, self._make_tuner, self._report = communicator, make_tuner, report
        self.lost, self.has_ended = LostTime(budget_seconds=budget_seconds), False
        self._tuner: Tuner | None = None

    def ask(self, question: Callable[[Tuner], tuple[Decision | Settled, bool]]) -> Answer | None:
        """Return the answer, None if the tuner raised; the same on all ranks.

        Args:
            question: returns what the tuner says, and whether the budget ended the search.

        Raises:
            CollectiveError: the exchange failed.
        """

        def safely() -> Answer | None:
            try:
                self._tuner = self._tuner or self._make_tuner()
                said, is_cut = question(self._tuner)
            except Exception as error:  # noqa: BLE001 - training goes on without the search
                _LOGGER.warning("the search for better plans ends here: %s", error)
                return None
            lost = self.lost
            return Answer(
                said=said, lost_seconds=lost.lost_seconds, is_spent=lost.is_spent, is_cut=is_cut
            )

        answer = decide_on_first(self.communicator, safely, "the next decision of the search")
        if answer is None:
            self.has_ended = True
        else:
            self.lost.lost_seconds, self.has_ended = answer.lost_seconds, answer.is_spent
        return answer

    def measured_everywhere(
        self, warm_up: Measured, measured: Measured
    ) -> tuple[Sequence[Measured], Sequence[Measured]]:
        """Return every rank's `measured` of the step that warmed up, and of the last one.

        Raises:
            CollectiveError: the exchange failed.
        """
        everywhere = self.communicator.all_gather_object(
            (warm_up, measured), "the agreement on a measured step"
        )
        warm_ups, steps = zip(*everywhere, strict=True)
        return warm_ups, steps

    def charge(self, ranks: Sequence[Measured], best_seconds: float | None) -> Measured:
        """Charge a step against the best known, and return the slowest rank's times, and calls.

        () of a step that a rank has not measured.
        """
        if not all(ranks):
            return ()
        *seconds, num_calls = slowest = tuple(map(max, zip(*ranks, strict=True)))
        self.lost.charge(
            call_seconds=sum(seconds), best_seconds=best_seconds, num_calls=round(num_calls)
        )
        return slowest

    def announce(
        self,
        plan: Plan,
        settled: Settled,
        *,
        num_trials: int,
        lost_seconds: float,
        is_cut: bool,
        doubts: str = "",
        is_reported: bool = True,
    ) -> None:
        """Log what was settled for a plan, and report it; on the first rank."""
        if self.communicator.rank:
            return
        budget_seconds = self.lost.budget_seconds if is_cut else None
        _LOGGER.info("%s%s", outcome(settled, num_trials, lost_seconds, budget_seconds), doubts)
        if self._report is not None and is_reported:
            self._report(plan, settled)
