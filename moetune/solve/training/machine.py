"""Times of the operations that a training step is made of, on a rank of a machine.

GEMMs and collectives come from the profile. What no profile of published tables has is modelled
from it, by rules with their sources beside them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from moetune.domain.cluster import Machine
from moetune.domain.costs import Costs, Trust, least_trust
from moetune.domain.errors import ProfileError
from moetune.domain.samples import CollectiveOp, GemmForm

_ADAM_BYTES = 30
"""Of one parameter's step: gradient, master copy and two moments read, all but the first written,
and the parameter itself; the reference profiles' rates of Adam are a data sheet's over these."""
_MEMORY_EFFICIENCY = 0.8
"""Of a data sheet's bandwidth that memory-bound kernels reach."""
_ATTENTION_RATES: Mapping[str, tuple[float, float]] = {
    "A100": (0.72, 0.62), "A800": (0.72, 0.62), "B200": (0.80, 0.62), "B300": (0.80, 0.62),
}  # fmt: skip
"""Of the rate of large GEMMs, forward and backward, by device; causal, bfloat16, heads of 128.

FlashAttention-2 (A100): 190 to 230 TFLOP/s forward and 170 to 196 backward, of 267.
FlashAttention-4 (B200; cuDNN 9.13 reaches 1 / 1.3 of it): 1,300 to 1,613 forward, of 1,500."""
_HOPPER_RATES = 0.62, 0.50
"""FlashAttention-3, Figures 5 and 6 (H100, causal, heads of 128, 4 k to 16 k tokens): about 500 to
640 TFLOP/s forward and 400 to 560 backward, of 790. Other devices are taken to be alike."""
_FULL_HEAD = 128
"""Narrower heads have as many exponentials for fewer products: with 64, FlashAttention-3 reaches
about 0.7 of its rate with 128, as the square root of the width."""
_RECURRENCE = 0.10
"""Of the same rate that chunked scans of states reach, counted by the recurrence; stated."""
_LARGE = 4096
_KERNEL_SECONDS = 3e-6
"""Of a memory-bound kernel's launch and tail, as the smallest GEMM of a profile takes."""

_BF16 = "bfloat16"


@dataclass
class Trusts:
    """The least trust in any number asked for."""

    least: Trust = "measured"

    def note(self, trust: Trust) -> None:
        """Lower the trust to this one."""
        self.least = least_trust((self.least, trust))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpan:
    """Ranks of a group, and the nodes that they are spread over evenly."""

    size: int
    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePrices:
    """One rank's operations, each time computed once. Not safe for several threads."""

    costs: Costs
    machine: Machine
    trusts: Trusts = field(default_factory=Trusts)
    _known: dict[tuple[object, ...], float] = field(default_factory=dict, init=False, repr=False)

    @property
    def per_node(self) -> int:
        """Devices of a node."""
        return self.machine.devices_per_node

    def span(self, size: int, stride: int) -> RankSpan:
        """Return a group of ranks at that distance from each other."""
        ranks = size * stride
        nodes = -(-ranks // self.per_node)
        return RankSpan(size=size, nodes=min(size, nodes))

    def gemm(
        self, product: GemmForm, *, rows: float, d_in: int, d_out: int, num_experts: int = 1,
        dtype: str = _BF16,
    ) -> float:  # fmt: skip
        """Return the seconds of one GEMM of `num_experts` experts with so many rows each."""
        if rows <= 0:
            return 0.0
        key = ("gemm", product, rows, d_in, d_out, num_experts, dtype)
        found = self._known.get(key)
        if found is None:
            estimate = self.costs.gemm(
                dtype=dtype, product=product, num_experts=num_experts, rows=rows,
                d_in=d_in, d_out=d_out,
            )  # fmt: skip
            self.trusts.note(estimate.trust)
            found = self._known[key] = estimate.seconds
        return found

    def collective(self, op: CollectiveOp, span: RankSpan, num_bytes: float) -> float:
        """Return the seconds of a collective; 0 in a group of one."""
        if span.size == 1 or num_bytes <= 0:
            return 0.0
        key = (op, span.size, span.nodes, num_bytes)
        found = self._known.get(key)
        if found is None:
            estimate = self.costs.collective(
                op=op,
                group_size=span.size,
                num_bytes=num_bytes,
                num_nodes=span.nodes if span.nodes > 1 else 0,
            )
            self.trusts.note(estimate.trust)
            found = self._known[key] = estimate.seconds
        return found

    def moved(self, num_bytes: float, *, kernels: int = 1) -> float:
        """Return the seconds of memory-bound kernels that read and write so many bytes in all."""
        return num_bytes / self.memory_bytes_per_second + kernels * _KERNEL_SECONDS

    @property
    def memory_bytes_per_second(self) -> float:
        """Rate of memory-bound kernels.

        Raises:
            ProfileError: the profile has no time of Adam, whose rate this is.
        """
        found = self._known.get(("memory",))
        if found is None:
            adam = self.costs.rows_op(op="adam", dtype=_BF16, rows=1e9, width=1)
            if adam is None:
                raise ProfileError(
                    "the profile has no time of Adam, which tells the rate of the memory",
                    "measure it with `moetune profile`, or name a reference such as h100-x8",
                )
            found = _MEMORY_EFFICIENCY * _ADAM_BYTES * 1e9 / adam.seconds
            self._known["memory",] = found
        return found

    def adam(self, parameters: float) -> float:
        """Return the seconds of Adam's step on so many parameters."""
        return self.moved(_ADAM_BYTES * parameters)

    def attention_core(self, macs: float, *, head_dim: float, backward: bool) -> float:
        """Return the seconds of causal attention without projections.

        Args:
            macs: of the forward pass; the backward pass has 2.5 times as many, since it computes
                the scores again.
            head_dim: mean width of a head's queries and values.
        """
        if not macs:
            return 0.0
        rates = next(
            (one for name, one in _ATTENTION_RATES.items() if name in self.machine.device),
            _HOPPER_RATES,
        )
        rate = self._macs_per_second * math.sqrt(min(1.0, head_dim / _FULL_HEAD))
        return 2.5 * macs / (rate * rates[1]) if backward else macs / (rate * rates[0])

    def recurrence(self, macs: float, *, backward: bool) -> float:
        """Return the seconds of a state's updates (state spaces, linear attention).

        Args:
            macs: of the forward pass, as the recurrence is written; chunked kernels do more.
        """
        return macs * (2 if backward else 1) / (self._macs_per_second * _RECURRENCE)

    @property
    def _macs_per_second(self) -> float:
        """Rate of a large GEMM."""
        seconds = self.gemm("forward", rows=_LARGE, d_in=_LARGE, d_out=_LARGE)
        return _LARGE**3 / seconds
