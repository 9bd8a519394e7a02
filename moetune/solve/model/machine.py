"""Times of a training step's operations on a rank: from the profile, or modelled on it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from moetune.domain.chips import memory_bytes_per_second
from moetune.domain.cluster import Machine
from moetune.domain.cost_keys import AttentionKey, CollectiveKey, CopyKey, GemmKey, RowsKey
from moetune.domain.costs import Costs, Doubt, Estimate, Trust, least_trust, seconds_if_known
from moetune.domain.errors import ProfileError
from moetune.domain.once import Tables, once
from moetune.domain.samples import LAUNCHES, CollectiveOp, Direction, GemmForm

ADAM_BYTES = 30
"""Bytes that Adam moves for one parameter. It reads gradient, master copy and two moments, and
writes the last three and the parameter. Reference profiles have Adam at a data sheet's rate over
these bytes."""
_MEMORY_EFFICIENCY = 0.8
"""Share of a data sheet's bandwidth that memory-bound kernels reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRates:
    """Rates of a device's other kernels as shares of the rate of large GEMMs.

    Args:
        attention, attention_backward: causal, bfloat16, heads of 128, in long sequences.
        triton: kernels in Triton, over the fastest attention forward.
        half_backward: tokens of a sequence at which the backward pass reaches half its rate.
        large: FLOP/s of large GEMMs that the shares refer to; None for the profile's.
    """

    attention: float
    attention_backward: float
    triton: float
    half_backward: float = 2.5e3
    large: float | None = None


_BLACKWELL_RATES = KernelRates(
    attention=1.24, attention_backward=0.92, triton=1 / 3.4, half_backward=1.2e3, large=1.505e15
)
_RATES: Mapping[str, KernelRates] = {
    # FlashAttention-2, whose authors' Triton kernel is as fast: up to 230 TFLOP/s forward and 196
    # backward, of 267.
    "A100": KernelRates(attention=0.88, attention_backward=0.82, triton=1.0),
    "A800": KernelRates(attention=0.88, attention_backward=0.82, triton=1.0),
    # cuDNN: 1,324 TFLOP/s forward and 1,083 backward at 4 k tokens, 1,698 and 1,298 at 16 k (arXiv
    # 2603.07685, Table 9), where GB200's large GEMMs reach 1,505; B200's and B300's published GEMMs
    # are a fifth slower, but their attention is not: 1,200 to 1,249 forward and 918 backward at 4 k
    # in training on B200 (together-dgxc-benchmarking, profiles of Qwen3-235B and DeepSeek-V3).
    # FlashAttention-4's forward pass is 2.7 times Triton's. Scans of states are slower: by public
    # runs of Nemotron-3 Nano on B200, GB200 and GB300 3.2 to 4.0 in 12 of 13 releases.
    "B200": _BLACKWELL_RATES,
    "B300": _BLACKWELL_RATES,
}
_HOPPER_RATES = KernelRates(attention=0.90, attention_backward=0.82, triton=1 / 1.6)
"""FlashAttention-3, Figures 5 and 6 (H100): 500 TFLOP/s forward at 4 k tokens and 640 at 16 k, 400
and 560 backward, of 790; Triton's 400. Other devices are assumed to be like it."""
_FLASH2 = (1.75, 1.6)
"""FlashAttention-2's seconds over FlashAttention-3's on Hopper, forward and backward (its §4.1)."""
_HALF_FORWARD = 1.7e3
"""Tokens of a sequence at which the forward pass reaches half its rate, fitted to both lengths."""
_FULL_HEAD = 128
"""Head width at the full rate. Narrower heads have as many exponentials for fewer products: at
width 64 FlashAttention-3 reaches about 0.7 of its rate, the square root of the ratio of widths."""
_RECURRENCE = 0.10
"""Share of the rate of large GEMMs that chunked scans of states reach in Triton on an A100, by MACs
of the recurrence. With it, Mamba-2's scan takes as long as FlashAttention-2 at 2 k tokens (Dao and
Gu 2024, Figure 10)."""
HOST_ADAM_SECONDS = 1.5e-9
"""Seconds to update a parameter on the host, with copies of it and its gradient: a published number
for all hosts (docs/decisions/memory.md#0084)."""
_LARGE = 4096
_KERNEL_SECONDS = 3e-6
"""Seconds of a memory-bound kernel's launch and tail, equal to the smallest GEMM of a profile."""

_GRACE, _SLOWER_HOST = ("GB200", "GB300", "GH200"), 1.2
"""Devices with Grace hosts, and their launch time over that of x86 hosts of H100 and B200. Launches
bind Nemotron-3 Super on both, with tp 2 and partial CUDA graphs (Megatron-Bridge, 26.04 to 26.08).
Without graphs Hy3-295B takes 1.5 times as long as with them (yangwhale/gpu-tpu-pedia). Hosts that
post messages of EFA are as slow: Qwen3-30B on p5 whose launches bind, and then Kimi-K2 on p6-b300
(awslabs/awsome-distributed-ai 95b939c)."""


@dataclass
class Trusts:
    """The least trust in any number that was asked for, and all doubts about them."""

    least: Trust = "measured"
    doubts: dict[Doubt, None] = field(default_factory=dict)

    def note(self, estimate: Estimate[float]) -> float:
        """Return the estimate's seconds; note its trust if it is lower, and its doubts."""
        self.least = least_trust((self.least, estimate.trust))
        self.doubts |= dict.fromkeys(estimate.doubts)
        return estimate.seconds


class RankSpan(NamedTuple):
    """Ranks of a group, and the number of nodes over which they are spread evenly."""

    size: int
    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePrices(Tables):
    """Times of one rank's operations, each computed once.

    Args:
        sustained: share of a kernel's rate alone that it reaches in a training step.
        gap_seconds: time between a GEMM and its neighbours, which a kernel alone lacks.
        attention_factor: factor on the times of attention and of recurrences.
        gemm_factor: factor that a question put on GEMM times; rates relative to GEMMs ignore it.
    """

    costs: Costs
    machine: Machine
    element: str = "bfloat16"
    sustained: float
    gap_seconds: float
    slowdown: float = 1.0
    posted_chunk_seconds: float
    attention_factor: float = 1.0
    gemm_factor: float = 1.0
    trusts: Trusts = field(default_factory=Trusts)

    @property
    def reached(self) -> float:
        """Share of a kernel's rate alone that a kernel of the runtime reaches."""
        return self.sustained / self.slowdown

    @property
    def host_seconds(self) -> float:
        """Seconds of this host for each second of an H100's x86 host."""
        is_slower = self.posted_chunk_seconds or any(chip in self.machine.device for chip in _GRACE)
        return _SLOWER_HOST if is_slower else 1.0

    @property
    def layer_launch_seconds(self) -> float | None:
        """Seconds to launch both passes of moetune's layer in one chunk; 0 on CPUs.

        They are for an x86 host, as in published profiles. None if they are unknown.
        """
        if self.machine.kind == "cpu":
            return 0.0
        step = seconds_if_known(self.costs, RowsKey(LAUNCHES[1], self.element), 1)
        is_x86 = step is None or step.trust == "modelled"
        return step and self.trusts.note(step) / (1.0 if is_x86 else self.host_seconds)

    @property
    def per_node(self) -> int:
        """Number of devices of a node."""
        return self.machine.devices_per_node

    def span(self, size: int, stride: int) -> RankSpan:
        """Return the group of `size` ranks that lie `stride` ranks apart."""
        ranks = size * stride
        nodes = -(-ranks // self.per_node)
        return RankSpan(size=size, nodes=min(size, nodes))

    @once(
        lambda product, *, rows, d_in, d_out, num_experts=1, dtype="": (
            product, rows, d_in, d_out, num_experts, dtype,
        )
    )  # fmt: skip
    def gemm(
        self, product: GemmForm, *, rows: float, d_in: int, d_out: int, num_experts: int = 1,
        dtype: str = "",
    ) -> float:  # fmt: skip
        """Return the seconds of a GEMM of experts with `rows` rows each; `element` by default."""
        if rows <= 0:
            return 0.0
        key = GemmKey(dtype or self.element, product, num_experts, d_in, d_out)
        seconds = self.trusts.note(self.costs.seconds(key, rows))
        return seconds / self.reached + self.gap_seconds

    @once(lambda op, span, num_bytes: (op, span, num_bytes))
    def collective(self, op: CollectiveOp, span: RankSpan, num_bytes: float) -> float:
        """Return the seconds of a collective; 0 for a single rank."""
        if span.size == 1 or num_bytes <= 0:
            return 0.0
        key = CollectiveKey(op, span.size, span.nodes if span.nodes > 1 else 0)
        return self.trusts.note(self.costs.seconds(key, num_bytes))

    def copy_seconds(self, direction: Direction, num_bytes: float) -> float:
        """Return the seconds of a copy from or to pinned host memory; ProfileError without it."""
        key = CopyKey(direction, pinned=True)
        return self.trusts.note(self.costs.seconds(key, num_bytes))

    @property
    @once(lambda: ())
    def host_adam_seconds(self) -> float:
        """Seconds to update one parameter in host memory."""
        host = seconds_if_known(self.costs, RowsKey("host_adam", self.element), 1e9)
        return HOST_ADAM_SECONDS if host is None else host.seconds / 1e9

    def memory_seconds(self, num_bytes: float, *, kernels: int = 1) -> float:
        """Return the seconds of memory-bound kernels that move `num_bytes` in total."""
        seconds = num_bytes / self.memory_bytes_per_second + kernels * _KERNEL_SECONDS
        return seconds / self.reached

    @property
    @once(lambda: ())
    def memory_bytes_per_second(self) -> float:
        """Rate of memory-bound kernels, by Adam's time or the data sheet; else ProfileError."""
        adam = seconds_if_known(self.costs, RowsKey("adam", self.element), 1e9)
        seconds = self.trusts.note(adam or self._adam_of_data_sheet())
        return _MEMORY_EFFICIENCY * ADAM_BYTES * 1e9 / seconds

    def _adam_of_data_sheet(self) -> Estimate[float]:
        rate = memory_bytes_per_second(self.machine.device)
        if rate is None:
            is_usual = self.element == "bfloat16"  # which every reference has
            instead = "name a reference such as h100-x8" if is_usual else "plan in bfloat16"
            raise ProfileError(
                f"the profile has no time of Adam in {self.element}, which tells the rate of the "
                "memory",
                f"measure it:  moetune profile --model NAME --dtype {self.element}; or {instead}",
            )
        doubt = Doubt(
            operation="the rate of the memory", size=1.0, unit="bytes", stand_in="the data sheet's"
        )
        return Estimate(seconds=ADAM_BYTES * 1e9 / rate, trust="modelled", doubts=(doubt,))

    def measured_attention(
        self, *, num_sequences: int, length: int, num_heads: int, head_dim: int, backward: bool
    ) -> float | None:
        """Return the profile's seconds of causal attention; None if it has none."""
        key = AttentionKey(self.element, length, num_heads, head_dim, backward)
        estimate = seconds_if_known(self.costs, key, num_sequences)
        if estimate is None:
            return None
        return self.attention_factor * self.trusts.note(estimate) / self.reached

    def attention_core(
        self, macs: float, *, head_dim: float, length: float, backward: bool,
        has_flash2: bool,
    ) -> float:  # fmt: skip
        """Return the seconds of causal attention without projections.

        Args:
            macs: of the forward pass; the backward pass, scores included, has 2.5 times as many.
            head_dim: mean width of a head's queries and values.
            length: tokens of a sequence in one kernel.
        """
        if not macs:
            return 0.0
        rates = self._rates
        rate = (
            self._large_macs_per_second
            * math.sqrt(min(1.0, head_dim / _FULL_HEAD))
            / self.attention_factor
        )
        if has_flash2 and rates is _HOPPER_RATES:
            rate /= _FLASH2[backward]
        if backward:
            rate *= rates.attention_backward * length / (length + rates.half_backward)
            return 2.5 * macs / rate
        return macs / (rate * rates.attention * length / (length + _HALF_FORWARD))

    def recurrence(self, macs: float, *, backward: bool) -> float:
        """Return the seconds of state updates, by the forward MACs of the recurrence."""
        rate = self._large_macs_per_second * _RECURRENCE * self._rates.triton
        return self.attention_factor * macs * (2 if backward else 1) / rate

    @property
    def _rates(self) -> KernelRates:
        name = self.machine.device
        return next((rates for chip, rates in _RATES.items() if chip in name), _HOPPER_RATES)

    @property
    def _large_macs_per_second(self) -> float:
        """Rate of large GEMMs that the shares of other kernels refer to."""
        if self._rates.large:
            return self._rates.large * self.reached / 2
        seconds = self.gemm("forward", rows=_LARGE, d_in=_LARGE, d_out=_LARGE)
        return self.gemm_factor * _LARGE**3 / (seconds - self.gap_seconds)
