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
"""A number, or an array in its place, where one sentence holds for both."""
_RANKS = {trust: rank for rank, trust in enumerate(TRUSTS)}
CopyMode = Literal["pinned", "pageable", "inline"]
"""Ways to offload activations. A copy engine does it while everything else runs ("pinned"). Copies
from "pageable" memory take the place of computation, and so do those of a CPU ("inline")."""


def least_trust(trusts: Iterable[Trust]) -> Trust:
    """Return the least trustworthy label; "measured" for none."""
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
        unit: of the sizes: "bytes", "rows", "elements" or "sequences".
        low, high: smallest and largest measured size; None where another operation stands in.
        stand_in: that operation, "" where there is none.
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
        seconds: a number; or an array, of some sizes or of some refits.
        trust: of several times "measured", which says nothing.
        doubts: what of it a measured profile has not measured; none of several times.
    """

    seconds: Number
    trust: Trust
    doubts: tuple[Doubt, ...] = ()


def scaled(estimate: Estimate[Number], factor: "float | Number") -> Estimate[Number]:
    """Return the estimate with so many times the seconds."""
    return Estimate(estimate.seconds * factor, estimate.trust, estimate.doubts)


class Costs(Protocol):
    """Times of a machine's operations: numbers for numbers, and arrays for arrays.

    A size may be a fraction, as those of chunks are. The times of a layer are arrays, without
    dimensions for a single size; those of many refits together have a time of each there.
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
        """Return the time at a size; ProfileError names the command that measures what lacks."""
        ...

    def knows(self, key: CostKey) -> bool:
        """Return whether `seconds` has a memory-bound operation, or attention."""
        ...

    def is_measured(self, dtype: str) -> bool:
        """Return whether points predict the dtype's GEMMs; else it is an α–β line."""
        ...

    def overlap_speeds(
        self, *, exchange_bytes: "Sizes", exchange_seconds: "Sizes"
    ) -> OverlapSpeeds:
        """Return the speeds of computation and all-to-alls of a size and a time, in overlap."""
        ...

    def step_errors(self, key: LayerKey, *, tokens: int) -> "StepErrors":
        """Return by how much steps of a layer differ from the sum of their operations."""
        ...


def seconds_if_known(costs: Costs, key: CostKey, size: Number) -> Estimate[Number] | None:
    """Return the time of a memory-bound operation or attention; None where it was not measured."""
    return costs.seconds(key, size) if costs.knows(key) else None


class Refit(Costs, Protocol):
    """Costs of a refit of a profile: of measurements drawn again within their errors."""

    def together(self, refits: Sequence["Refit"]) -> Costs:
        """Return costs with arrays of the refits' times; TypeError of several profiles."""
        ...
