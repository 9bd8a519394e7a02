"""Costs of operations in seconds, each with the trust in it: `fit` provides them to the solvers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, Protocol, TypeVar, get_args

from moetune.domain.cost_keys import CostKey
from moetune.domain.interference import OverlapSpeeds, SpeedTable
from moetune.domain.layer import LayerKey

if TYPE_CHECKING:  # they load NumPy, which a command's help does without
    from moetune.domain.arrays import Floats, Sizes
    from moetune.domain.step_errors import StepErrors

Trust = Literal["measured", "interpolated", "extrapolated", "modelled"]
TRUSTS: tuple[Trust, ...] = get_args(Trust)
Number = TypeVar("Number", float, "Floats")
"""A number or an array, for functions that return the type that they receive."""
_RANKS = {trust: rank for rank, trust in enumerate(TRUSTS)}
CopyMode = Literal["pinned", "pageable", "inline"]
"""Ways to offload activations. A copy engine does it while everything else runs ("pinned"). Copies
from "pageable" memory take the place of computation, and so do those of a CPU ("inline")."""


def least_trust(trusts: Iterable[Trust]) -> Trust:
    """Return the least trustworthy label; "measured" if there are none."""
    return max(trusts, key=_RANKS.__getitem__, default="measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """seconds(size) = alpha + beta·size, the size in bytes or MACs.

    Source: PipeMoE, Eq. 13 and 16.
    """

    alpha_seconds: float
    beta_seconds: float

    def seconds(self, size: Number) -> Number:
        """Return the time of one operation of that size."""
        return self.alpha_seconds + self.beta_seconds * size


class Doubt(NamedTuple):
    """An operation that was not measured at a size, or not at all.

    Args:
        operation: "all_to_all of 2 ranks, 4 in flight".
        unit: unit of the sizes: "bytes", "rows", "elements" or "sequences".
        low, high: smallest and largest measured size; None where another operation stands in.
        stand_in: the operation that stands in; "" if there is none.
    """

    operation: str
    size: float
    unit: str
    low: float | None = None
    high: float | None = None
    stand_in: str = ""


class Estimate(NamedTuple, Generic[Number]):
    """A predicted time, or times; not a dataclass, because a plan makes thousands.

    Args:
        seconds: a number, or an array over sizes or over refits.
        trust: label of a single time; for an array always "measured", which says nothing.
        doubts: operations that the measured profile lacks; empty for an array.
    """

    seconds: Number
    trust: Trust
    doubts: tuple[Doubt, ...] = ()


def scaled(estimate: Estimate[Number], factor: "float | Number") -> Estimate[Number]:
    """Return the estimate with its seconds multiplied by the factor."""
    return Estimate(estimate.seconds * factor, estimate.trust, estimate.doubts)


class Costs(Protocol):
    """Times of a machine's operations: a number for a number, an array for an array.

    A size may be a fraction, as a chunk's size is. The times of a layer are arrays: without
    dimensions for a single size, or with a time for each of several refits.
    """

    @property
    def speeds(self) -> SpeedTable:
        """Speeds of operations of different classes in overlap."""
        ...

    @property
    def copy_mode(self) -> CopyMode | None:
        """Way to offload activations; None where copies were not measured both ways."""
        ...

    def seconds(self, key: CostKey, size: Number) -> Estimate[Number]:
        """Return the time at a size; raises ProfileError, which names the command to measure it."""
        ...

    def knows(self, key: CostKey) -> bool:
        """Return whether `seconds` has a time of this memory-bound operation or attention."""
        ...

    def is_measured(self, dtype: str) -> bool:
        """Return whether measured points predict the dtype's GEMMs, instead of an α–β line."""
        ...

    def overlap_speeds(
        self, *, exchange_bytes: "Sizes", exchange_seconds: "Sizes"
    ) -> OverlapSpeeds:
        """Return the speeds in overlap of computation and of all-to-alls of this size and time."""
        ...

    def step_errors(self, key: LayerKey, *, tokens: int) -> "StepErrors":
        """Return how much measured steps of a layer differ from the sum of their operations."""
        ...


def seconds_if_known(costs: Costs, key: CostKey, size: Number) -> Estimate[Number] | None:
    """Return the time of a memory-bound operation or attention; None where it was not measured."""
    return costs.seconds(key, size) if costs.knows(key) else None


class Refit(Costs, Protocol):
    """Costs of a profile that was refitted to measurements redrawn within their errors."""

    def together(self, refits: Sequence["Refit"]) -> Costs:
        """Return costs whose times are arrays over refits; raises TypeError if profiles differ."""
        ...
