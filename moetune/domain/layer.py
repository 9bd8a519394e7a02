"""The MoE layer to plan for, its workload (ranks and tokens per rank), and rates of model FLOPs.

Model FLOPs are those of `Decoder.flops_per_token`: three times the forward GEMMs, with or without
recomputation. MFU: PaLM, Appendix B, with the peak of the data sheet.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

from moetune.domain.document import UNLESS_DEFAULT
from moetune.domain.errors import InputError, check_positive
from moetune.domain.kernels import KernelName
from moetune.domain.placement import check_order
from moetune.domain.routing import EVEN, LayerRouting, RankSkew, reached_ranks
from moetune.domain.units import dtype_bytes

Activation = Literal["relu", "gelu", "silu", "swiglu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
ExpertParallel = Literal["all_to_all", "tensor"]
"""Parallelism of experts: tokens travel to them by all-to-all, or every rank has all tokens
and the experts' outputs are summed (PPMoE §3.3)."""
Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class LayerShape:
    """One MoE layer; raises InputError for a wrong size, a large top_k or a wrong activation."""

    d_model: int
    d_hidden: int
    num_experts: int
    top_k: int = 1
    activation: Activation = "gelu"

    def __post_init__(self) -> None:
        for name in ("d_model", "d_hidden", "num_experts", "top_k"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.top_k > self.num_experts:
            raise InputError(
                f"top_k ({self.top_k}) is larger than num_experts ({self.num_experts})"
            )
        if self.activation not in ACTIVATIONS:
            raise InputError(
                f"activation {self.activation!r} is unknown", f"use one of {', '.join(ACTIVATIONS)}"
            )

    @property
    def num_gemms(self) -> int:
        """Number of GEMMs of one expert's forward pass: 2, or 3 for swiglu."""
        return 3 if self.activation == "swiglu" else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKey:
    """Key of a layer's plans, for any number of tokens.

    Args:
        num_ranks: ranks that share the layer's experts, not all that a plan is for.
    """

    layer: LayerShape
    num_ranks: int
    dtype: str
    expert_parallel: ExpertParallel = "all_to_all"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Workload:
    """A layer, the ranks that share its experts, and one step's tokens on each of them.

    Args:
        tokens_per_rank: tokens of each rank; with "tensor" every rank computes the same tokens.
        routing: text of a `LayerRouting`; "" for balanced.
        placement: expert of each place in the order of the ranks; empty for the natural order.
        kernel: kernel of the experts; "" for the layer's default.

    Raises:
        InputError: a size below 1, an unknown dtype, experts that do not divide by the ranks,
            or a placement that does not list each expert once.
    """

    layer: LayerShape
    world_size: int
    tokens_per_rank: int
    dtype: str = "float32"
    expert_parallel: ExpertParallel = "all_to_all"
    routing: str = field(default="", metadata=UNLESS_DEFAULT)
    placement: tuple[int, ...] = field(default=(), metadata=UNLESS_DEFAULT)
    kernel: KernelName = field(default="", metadata=UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        check_positive(self, "world_size", "tokens_per_rank")
        dtype_bytes(self.dtype)
        check_divisible(self.layer.num_experts, self.world_size)
        if self.placement:
            check_order(self.placement, self.layer.num_experts)

    @property
    def skew(self) -> RankSkew:
        """Load of the fullest rank, as a multiple of the mean load."""
        if not self.routing:
            return EVEN
        return LayerRouting.of(self.routing).skew(
            num_experts=self.layer.num_experts, top_k=self.layer.top_k, ranks=self.world_size,
            experts=self.placement,
        )  # fmt: skip

    @property
    def key(self) -> LayerKey:
        """Key of the layers that a plan for this workload serves."""
        return LayerKey(
            layer=self.layer,
            num_ranks=self.world_size,
            dtype=self.dtype,
            expert_parallel=self.expert_parallel,
        )

    @property
    def local_experts(self) -> int:
        """Number of experts on one rank."""
        return self.layer.num_experts // self.world_size

    @property
    def sent_share(self) -> float:
        """Share of token-expert pairs that travel: a token goes once to each rank with its experts.

        All experts count as equally likely. All pairs travel where a rank has a single expert.
        """
        if self.expert_parallel == "tensor" or not 1 < self.world_size < self.layer.num_experts:
            return 1.0
        ranks = reached_ranks(self.layer.top_k, self.layer.num_experts, self.world_size)
        return ranks / self.layer.top_k

    @property
    def rows(self) -> int:
        """Token-expert pairs of one rank, which are its rows after a balanced dispatch: T·k."""
        return self.tokens_per_rank * self.layer.top_k

    @property
    def payload_bytes(self) -> int:
        """Input bytes of one rank's unsplit all-to-all: y = T·k·M·s."""
        return self.rows * self.layer.d_model * dtype_bytes(self.dtype)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one rank's unsplit expert GEMM: T·k·M·H."""
        return self.rows * self.layer.d_model * self.layer.d_hidden


def check_divisible(num_experts: int, world_size: int) -> None:
    """Raise InputError, with the nearest counts that work, unless the ranks divide the experts."""
    if num_experts % world_size:
        below = num_experts // world_size * world_size
        near = f"{below} or {below + world_size}" if below else f"{world_size}"
        raise InputError(
            f"num_experts ({num_experts}) does not divide by the {world_size} ranks sharing them",
            f"use {near} experts, or a number of ranks that divides {num_experts}",
        )


FORWARD_AND_BACKWARD = 3
OPERATIONS_OF_A_MAC = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """Model FLOPs a second of one device.

    Args:
        mfu: share of the device's peak; None if no peak is known.
    """

    flops_per_second: float
    mfu: float | None

    def over(self, seconds: float, predicted: float) -> "Throughput | None":
        """Return the throughput for `seconds` instead of `predicted`; None for 0 seconds."""
        if seconds <= 0:
            return None
        factor = predicted / seconds
        mfu = None if self.mfu is None else self.mfu * factor
        return Throughput(flops_per_second=self.flops_per_second * factor, mfu=mfu)


def rate(flops: float, seconds: float, peak: float | None) -> Throughput | None:
    """Return the throughput of one device with these FLOPs; None for 0 seconds."""
    if seconds <= 0:
        return None
    achieved = flops / seconds
    return Throughput(flops_per_second=achieved, mfu=None if peak is None else achieved / peak)


def layer_flops(workload: Workload) -> float:
    """Return the model FLOPs of one device in a layer's step; tensor ranks share them."""
    sharing = workload.world_size if workload.expert_parallel == "tensor" else 1
    macs = workload.layer.num_gemms * workload.macs / sharing
    return OPERATIONS_OF_A_MAC * FORWARD_AND_BACKWARD * macs
