"""Placement of each layer's experts on ranks by their loads: which expert each place has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moetune.domain.errors import InputError

PlacementRule = Literal["planned", "natural"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlacement:
    """Placement of a layer's experts; raises InputError if an expert has no place.

    Args:
        experts: expert of each place, in the order of the ranks; empty for the natural order.
        natural_skew: rows of the fullest rank over the mean in the natural order.
        placed_skew: the same for the best placement; the natural order's where none is better.
        least_skew: lower bound of the skew of any placement.
    """

    experts: tuple[int, ...] = ()
    natural_skew: float
    placed_skew: float
    least_skew: float

    def __post_init__(self) -> None:
        if self.experts:
            check_order(self.experts, len(self.experts))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementChoice(LayerPlacement):
    """A layer's placement of experts on ranks, against their natural order.

    Args:
        natural_step_seconds: predicted step of the natural order; None where it does not fit.
    """

    natural_step_seconds: float | None
    placed_step_seconds: float
    why: str

    @property
    def gain(self) -> float | None:
        """Share of the natural order's step that the placement saves."""
        return _gain(self.natural_step_seconds, self.placed_step_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlacement:
    """Placement of a model's experts, against their natural order.

    Args:
        layers: placement of each layer of experts, in order, for the plan's layout.
        natural_step_seconds: step of the best layout in natural order; None if none fits.
        placed_step_seconds: step of the best layout with placed experts; None if none was tried.
    """

    layers: tuple[LayerPlacement, ...]
    natural_step_seconds: float | None
    placed_step_seconds: float | None
    why: str

    @property
    def is_taken(self) -> bool:
        """Whether the experts of any layer are not in their natural order."""
        return any(layer.experts for layer in self.layers)

    @property
    def gain(self) -> float | None:
        """Share of the natural order's step that placed experts save."""
        return _gain(self.natural_step_seconds, self.placed_step_seconds)


def _gain(natural_seconds: float | None, placed_seconds: float | None) -> float | None:
    if not natural_seconds or placed_seconds is None:
        return None
    return 1 - placed_seconds / natural_seconds


def check_order(experts: Sequence[int], num_experts: int) -> None:
    """Raise InputError unless each of the experts has exactly one place."""
    if sorted(experts) == list(range(num_experts)):
        return
    missing = sorted(set(range(num_experts)) - set(experts))
    what = f"{len(experts)} places for {num_experts} experts"
    if len(experts) == num_experts:
        what = f"no place for expert {missing[0]}"
    raise InputError(
        f"a placement must have each expert once, this placement has {what}",
        "give the expert of each place in the order of the ranks, such as (0, 3, 1, 2)",
    )


def places_of(experts: Sequence[int]) -> tuple[int, ...]:
    """Return the place of each expert, from the expert of each place."""
    return tuple(sorted(range(len(experts)), key=experts.__getitem__))
