"""Experts of a model's layers in the order of the ranks, each layer by its own loads, and why."""

from dataclasses import dataclass, field

from moetune.domain.document import UNLESS_DEFAULT
from moetune.domain.placement import (
    EMPTY,
    ReplicaChoice,
    check_all_placed,
    check_order,
    has_replicas,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlacement:
    """Where the experts of one layer are.

    Args:
        experts: expert of each place, of which rank r has the r-th of equal parts; empty for the
            natural order. A hot expert may have several places; see `domain.placement`.
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
        if self.experts and not self.has_replicas:
            check_order(self.experts, len(self.experts))
        elif self.experts:
            check_all_placed(self.experts)

    @property
    def skew(self) -> float:
        """Rows of the fullest rank over the mean, as the experts are."""
        return self.placed_skew if self.experts else self.natural_skew

    @property
    def has_replicas(self) -> bool:
        """Whether an expert has several places."""
        return has_replicas(self.experts)

    @property
    def num_replicas(self) -> int:
        """Places of experts beyond the first one of each."""
        found = [expert for expert in self.experts if expert != EMPTY]
        return len(found) - len({*found})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlacement:
    """Placement of a model's experts, against their natural order.

    Args:
        layers: of experts, in order, for the ranks of the plan's layout.
        natural_step_seconds: predicted step of the best layout in the natural order; None where
            none fits.
        placed_step_seconds: of the best layout with placed experts, each in one place; None where
            none was tried.
        why: the reason for the one or the other.
        replicas: of hot experts; None where the plan has none.
    """

    layers: tuple[LayerPlacement, ...]
    natural_step_seconds: float | None
    placed_step_seconds: float | None
    why: str
    replicas: ReplicaChoice | None = field(default=None, metadata=UNLESS_DEFAULT)

    @property
    def has_replicas(self) -> bool:
        """Whether hot experts have places on several ranks."""
        return self.replicas is not None and self.replicas.is_taken

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
