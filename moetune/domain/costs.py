"""Costs of operations in seconds, each with the trust in it: `fit` provides them to the solvers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast, get_args

from moetune.domain.cost_keys import CostKey
from moetune.domain.interference import Interference, OverlapSpeeds
from moetune.domain.layer import LayerKey

if TYPE_CHECKING:  # it loads NumPy, which a command's help does without
    from moetune.domain.step_errors import StepErrors

Trust = Literal["measured", "interpolated", "extrapolated", "modelled"]
TRUSTS: tuple[Trust, ...] = get_args(Trust)
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

    def seconds(self, size: float) -> float:
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


class Estimate(NamedTuple):
    """A predicted time; not a dataclass, because a plan makes thousands.

    Args:
        doubts: what of it a measured profile has not measured.
    """

    seconds: float
    trust: Trust
    doubts: tuple[Doubt, ...] = ()

    def scaled(self, factor: float) -> "Estimate":
        """Return the estimate with so many times the seconds."""
        if (factor == 1) is True:  # no array of factors, either
            return self
        return Estimate(seconds=self.seconds * factor, trust=self.trust, doubts=self.doubts)


class Costs(Protocol):
    """Times of a machine's operations.

    A size may be a fraction, as those of chunks are, or an array of sizes. An estimate then has an
    array of seconds, and neither trust nor doubts. Costs of many refits (`costs_of_all`) have an
    array of seconds for a single size.
    """

    @property
    def interference(self) -> Interference:
        """Speeds of operations of different classes beside each other."""
        ...

    @property
    def copy_mode(self) -> CopyMode | None:
        """Way to offload activations; None where copies were not measured both ways."""
        ...

    def seconds(self, key: CostKey, size: float) -> Estimate:
        """Return the time at a size; ProfileError names the command that measures what lacks."""
        ...

    def knows(self, key: CostKey) -> bool:
        """Return whether `seconds` has a memory-bound operation, or attention."""
        ...

    def is_measured(self, dtype: str) -> bool:
        """Return whether points predict the dtype's GEMMs; else it is an α–β line."""
        ...

    def overlap_speeds(self, *, exchange_bytes: float, exchange_seconds: float) -> OverlapSpeeds:
        """Return the speeds of computation and all-to-alls of a size and a time, in overlap."""
        ...

    def step_errors(self, key: LayerKey, *, tokens: int) -> "StepErrors":
        """Return by how much steps of a layer differ from the sum of their operations."""
        ...


def seconds_if_known(costs: Costs, key: CostKey, size: float) -> Estimate | None:
    """Return the time of a memory-bound operation or attention; None where it was not measured."""
    return costs.seconds(key, size) if costs.knows(key) else None


def costs_of_all(refits: Sequence[Costs]) -> Costs:
    """Return costs with arrays of seconds, of refits of one profile; else TypeError."""
    together: Costs = cast("Any", refits[0]).together(refits)
    return together
