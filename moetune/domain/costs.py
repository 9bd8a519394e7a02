"""Costs of operations in seconds, each with the trust in it: `fit` provides them to the solvers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, get_args

from moetune.domain.gemm_forms import GemmForm
from moetune.domain.interference import Interference, OverlapSpeeds
from moetune.domain.layer import LayerKey
from moetune.domain.samples import CollectiveOp, Direction
from moetune.domain.step_errors import StepErrors

Trust = Literal["measured", "interpolated", "extrapolated", "modelled"]
TRUSTS: tuple[Trust, ...] = get_args(Trust)
_RANKS = {trust: rank for rank, trust in enumerate(TRUSTS)}
CopyMode = Literal["pinned", "pageable", "inline"]
"""Ways to offload activations: by a copy engine while everything else runs ("pinned"), or in the
place of computation (from "pageable" memory, and "inline" on a CPU, which copies itself)."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Lead of collectives over their rate when they begin after a pause of the link.

    Args:
        seconds: on the link at most; a pause of that length gives it back in full.
        share: of the collectives' time at most: what was measured over a stream may be a rate that
            holds for its while, as well as bytes that pass at once.
    """

    seconds: float = 0.0
    share: float = 0.95


NO_BURST = Burst()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelError:
    """Error of predicted steps besides that of their costs: standard deviations of the logarithm.

    Args:
        common: of all choices for a layer or model on a machine alike.
        own: of each choice.
    """

    common: float = 0.0
    own: float = 0.0


class Costs(Protocol):
    """Times of a machine's operations. Sizes may be fractions: those of chunks are.

    Where `takes_arrays`, sizes and numbers in flight may be arrays, too: an estimate then has an
    array of seconds, and neither trust nor doubts.
    """

    @property
    def interference(self) -> Interference:
        """Speeds of operations of different classes beside each other."""
        ...

    def overlap_speeds(self, *, exchange_bytes: float, exchange_seconds: float) -> OverlapSpeeds:
        """Return the speeds of computation and of back-to-back all-to-alls while they overlap.

        Args:
            exchange_bytes: input of one all-to-all on one rank.
            exchange_seconds: of one all-to-all, undisturbed.
        """
        ...

    def burst(self, *, op: CollectiveOp, group_size: int, num_nodes: int = 0) -> Burst:
        """Return what collectives gain by a pause of the link; nothing where it is not known."""
        ...

    def gemm_line(self, *, dtype: str) -> LinearCost | None:
        """Return the α–β line over MACs; None where measured points predict."""
        ...

    def collective_line(
        self, *, op: CollectiveOp, group_size: int, num_nodes: int = 0
    ) -> LinearCost | None:
        """Return the α–β line over input bytes; None where measured points predict."""
        ...

    def gemm(
        self, *, dtype: str, product: GemmForm, num_experts: int, rows: float, d_in: int, d_out: int
    ) -> Estimate:
        """Return the time of one GEMM of `num_experts` experts with `rows` rows each.

        Raises:
            ProfileError: nothing is known about that dtype.
        """
        ...

    def rows_op(self, *, op: str, dtype: str, rows: float, width: int) -> Estimate | None:
        """Return the time of a memory-bound operation; None where it was not measured."""
        ...

    def collective(
        self,
        *,
        op: CollectiveOp,
        group_size: int,
        num_bytes: float,
        in_flight: int = 1,
        num_nodes: int = 0,
    ) -> Estimate:
        """Return the time of one collective.

        Args:
            num_nodes: nodes that the ranks are spread over evenly; 0 for consecutive ranks.

        Raises:
            ProfileError: such a group was not measured; the text names the command that does.
        """
        ...

    def attention(
        self,
        *,
        dtype: str,
        num_sequences: float,
        length: int,
        num_heads: int,
        head_dim: int,
        backward: bool,
    ) -> Estimate | None:
        """Return the time of causal self-attention without its projections.

        Args:
            backward: the gradients of query, key and value instead.

        Returns:
            None where it was not measured.
        """
        ...

    def step_errors(self, key: LayerKey, *, tokens: int) -> StepErrors:
        """Return by how much steps of a layer differ from the sum of their operations.

        Args:
            tokens: of one step on one rank.
        """
        ...

    @property
    def copy_mode(self) -> CopyMode | None:
        """Way to offload activations; None where copies were not measured both ways."""
        ...

    def copy(self, *, direction: Direction, pinned: bool, num_bytes: float) -> Estimate:
        """Return the time of one copy.

        Raises:
            ProfileError: no such copy was measured.
        """
        ...


def takes_arrays(costs: Costs) -> bool:
    """Return whether the costs predict arrays of sizes at once."""
    return bool(getattr(costs, "takes_arrays", False))


def costs_of_all(refits: Sequence[Costs]) -> Costs | None:
    """Return costs with an array of seconds in each estimate, one for each of the refits.

    Returns:
        None where the refits know of none.
    """
    together = getattr(refits[0], "together", None)
    return None if together is None else together(refits)
