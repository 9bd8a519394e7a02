"""Time that a search in training loses: its steps' excess over the best decision known by then."""

import math
from dataclasses import dataclass

from moetune.domain.errors import InputError

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
