"""Experts of a model's layers in the order of the ranks, each layer by its own loads, and why."""

from dataclasses import dataclass

from moetune.domain.placement import check_order


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlacement:
    """Where the experts of one layer are.

    Args:
        experts: expert of each place, of which rank r has the r-th of equal parts; empty for the
            natural order.
        natural_skew: rows of the fullest rank over the mean in the natural order.
        placed_skew: with the best placement that was found, the natural order's where none is
            better.
        least_skew: no placement is below.

    Raises:
        InputError: an expert has no place.
    """

    experts: tuple[int, ...] = ()
    natural_skew: float
    placed_skew: float
    least_skew: float

    def __post_init__(self) -> None:
        if self.experts:
            check_order(self.experts, len(self.experts))

    @property
    def skew(self) -> float:
        """Rows of the fullest rank over the mean, as the experts are."""
        return self.placed_skew if self.experts else self.natural_skew


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlacement:
    """Placement of a model's experts, against their natural order.

    Args:
        layers: of experts, in order, for the ranks of the plan's layout.
        natural_step_seconds: predicted step of the best layout in the natural order; None where
            none fits.
        placed_step_seconds: of the best layout with placed experts; None where none was tried.
        why: the reason for the one or the other.
    """

    layers: tuple[LayerPlacement, ...]
    natural_step_seconds: float | None
    placed_step_seconds: float | None
    why: str

    @property
    def is_taken(self) -> bool:
        """Whether a layer's experts are in another order than their own."""
        return any(one.experts for one in self.layers)

    @property
    def gain(self) -> float | None:
        """Share of the natural order's step that placed experts save."""
        if not self.natural_step_seconds or self.placed_step_seconds is None:
            return None
        return 1 - self.placed_step_seconds / self.natural_step_seconds
