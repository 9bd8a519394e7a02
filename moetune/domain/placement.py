"""Experts in the order of the ranks: which expert each place of a layer has, and why."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moetune.domain.errors import InputError

PlacementRule = Literal["planned", "natural"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementChoice:
    """A plan's placement of experts on ranks, against their natural order.

    Args:
        experts: expert of each place, of which rank r has the r-th of equal parts; empty for the
            natural order.
        natural_skew, placed_skew: rows of the fullest rank over the mean in the natural order, and
            with the best placement that was found.
        least_skew: no placement is below.
        natural_step_seconds: predicted step of the natural order; None where it does not fit.
        placed_step_seconds: predicted step of the placement.
        why: the reason for the one or the other.

    Raises:
        InputError: an expert has no place.
    """

    experts: tuple[int, ...] = ()
    natural_skew: float
    placed_skew: float
    least_skew: float
    natural_step_seconds: float | None
    placed_step_seconds: float
    why: str

    def __post_init__(self) -> None:
        if self.experts:
            check_order(self.experts, len(self.experts))

    @property
    def gain(self) -> float | None:
        """Share of the natural order's step that the placement saves."""
        if not self.natural_step_seconds:
            return None
        return 1 - self.placed_step_seconds / self.natural_step_seconds


def check_order(experts: Sequence[int], num_experts: int) -> None:
    """Raise InputError unless each of so many experts has one place."""
    if sorted(experts) == list(range(num_experts)):
        return
    missing = sorted(set(range(num_experts)) - set(experts))
    what = f"{len(experts)} places for {num_experts} experts"
    if len(experts) == num_experts:
        what = f"no place for expert {missing[0]}"
    raise InputError(
        f"a placement must have each expert once, this one has {what}",
        "give the expert of each place in the order of the ranks, such as (0, 3, 1, 2)",
    )


def places_of(experts: Sequence[int]) -> tuple[int, ...]:
    """Return the place of each expert, from the expert of each place."""
    return tuple(sorted(range(len(experts)), key=experts.__getitem__))
