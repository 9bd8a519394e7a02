"""Activations of one chunk's rows, for experts with separate or with fused matrices.

`experts` calls this between the products. Results go to the caller's buffers,
because fresh buffers cost page faults: up to three times the operation that fills them on a CPU.
The backward of an activation needs its input, the pre-activation.

Model libraries store the gate and the up-projection as one matrix: one product gives both, and
h = f(g)·u of (g, u) = x·W₁ + b₁, for swiglu with f = silu.

R rows, H hidden width, F = 2·H, E local experts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from moetune.domain.layer import Activation
from moetune.runtime.moe.workspace import Shape

GateFunction = Literal["silu", "gelu", "gelu_tanh", "relu"]
_APPROXIMATION = MappingProxyType({"gelu": "none", "gelu_tanh": "tanh"})
_BLOCK_VALUES = MappingProxyType({"cpu": 2**15, "cuda": 2**25})
"""Values in a temporary: few enough for a CPU's cache, enough to keep a GPU's launches few."""


def activate(
    pre: torch.Tensor, gate: torch.Tensor | None, activation: Activation, out: torch.Tensor
) -> torch.Tensor:
    """Return act(pre) in `out`; for swiglu silu(pre) · gate."""
    _apply("silu" if activation == "swiglu" else activation, pre, out)
    return out if gate is None else out.mul_(gate)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedGate:
    """The gate h = (u + 1)·g·σ(α·g) of gpt-oss, with g clamped to ≤ limit and u to |u| ≤ limit."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedForm:
    """The form of experts whose gate and up-projection are a fused matrix.

    Args:
        function: the gate's activation f.
        is_interleaved: columns are g, u, g, u, …; otherwise all of g, then all of u.
        is_transposed: parameters are (E, out, in), as those of `nn.Linear`.
        clamped: the clamped gate, used instead of `function`.
    """

    function: GateFunction = "silu"
    is_interleaved: bool = False
    is_transposed: bool = False
    clamped: ClampedGate | None = None

    @property
    def is_plain_swiglu(self) -> bool:
        """Whether h = silu(g)·u, and the columns are all of g, then all of u."""
        return self.function == "silu" and not self.is_interleaved and self.clamped is None

    def stored(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return a parameter's view (E, in, out), or such a matrix in the parameter's layout."""
        return matrix.transpose(1, 2) if self.is_transposed else matrix

    def split(self, fused_RF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views (R, H) of the gate's part and of the up-projection's."""
        if self.is_interleaved:
            return fused_RF[:, ::2], fused_RF[:, 1::2]
        gate, up = fused_RF.chunk(2, dim=1)
        return gate, up

    def backward_shapes(self, num_rows: int, d_hidden: int) -> dict[str, Shape]:
        """Return the shapes of a backward phase's buffers, for one chunk."""
        shapes = {"grad pre": (num_rows, 2 * d_hidden)}
        if self.is_interleaved:  # whose halves no GEMM reads or writes
            shapes |= dict.fromkeys(("hidden", "grad hidden"), (num_rows, d_hidden))
        return shapes

    def backward_buffers(
        self, buffers: Mapping[str, torch.Tensor], num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return buffers for h and its gradient (R, H) each, and for the gradient of (g, u) (R, F).

        Unless columns interleave, the first two are halves of the third, which `grad` overwrites.
        """
        grad_RF = buffers["grad pre"][:num_rows]
        if self.is_interleaved:
            return buffers["hidden"][:num_rows], buffers["grad hidden"][:num_rows], grad_RF
        grad_hidden, hidden = self.split(grad_RF)
        return hidden, grad_hidden, grad_RF

    def activate(self, pre_RF: torch.Tensor, out_RH: torch.Tensor) -> torch.Tensor:
        """Return h in `out_RH`."""
        gate, up = self.split(pre_RF)
        if self.clamped is None:
            return _apply(self.function, gate, out_RH).mul_(up)
        for some in _blocks(out_RH):
            g, u, s = self._clamp(gate[some], up[some], self.clamped)
            torch.mul(u.add_(1), g.mul_(s), out=out_RH[some])
        return out_RH

    def grad(
        self, pre_RF: torch.Tensor, grad_RH: torch.Tensor, out_RF: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of g and u in `out_RF`.

        Args:
            grad_RH: the gradient of h; it is overwritten, and may be the gate's part of `out_RF`.
        """
        (gate, up), (grad_gate, grad_up) = self.split(pre_RF), self.split(out_RF)
        if self.clamped is None:
            _apply(self.function, gate, grad_up).mul_(grad_RH)
            derive(self.function, grad_RH.mul_(up), gate, grad_gate)
            return out_RF
        limit, alpha = self.clamped.limit, self.clamped.alpha
        for some in _blocks(grad_RH):
            g, u, s = self._clamp(gate[some], up[some], self.clamped)
            is_free = up[some].abs() <= limit
            u.add_(1).mul_(grad_RH[some]).mul_(gate[some] <= limit)
            torch.mul(g * s, grad_RH[some], out=grad_up[some]).mul_(is_free)
            # σ + α·g·σ·(1 − σ)
            torch.mul(u, g.mul_(1 - s).mul_(alpha).add_(1).mul_(s), out=grad_gate[some])
        return out_RF

    @staticmethod
    def _clamp(
        gate: torch.Tensor, up: torch.Tensor, clamped: ClampedGate
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the clamped gate and up-projection, and σ(α·gate)."""
        gate = gate.clamp(max=clamped.limit)
        up = up.clamp(min=-clamped.limit, max=clamped.limit)
        return gate, up, (gate * clamped.alpha).sigmoid_()


def _apply(function: GateFunction, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if function == "silu":
        torch.ops.aten.silu.out(x, out=out)
    elif function == "relu":
        torch.clamp(x, min=0, out=out)
    else:
        torch.ops.aten.gelu.out(x, approximate=_APPROXIMATION[function], out=out)
    return out


def derive(
    function: GateFunction, grad: torch.Tensor, x: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Return grad · f'(x) in `out`, which may be `grad`."""
    aten = torch.ops.aten
    if function == "silu":
        aten.silu_backward.grad_input(grad, x, grad_input=out)
    elif function == "relu":
        aten.threshold_backward.grad_input(grad, x, 0, grad_input=out)
    else:
        kind = _APPROXIMATION[function]
        aten.gelu_backward.grad_input(grad, x, approximate=kind, grad_input=out)
    return out


def _blocks(rows: torch.Tensor) -> Iterator[slice]:
    values = _BLOCK_VALUES.get(rows.device.type, _BLOCK_VALUES["cuda"])
    step = max(1, values // max(1, rows.shape[1]))
    return (slice(low, low + step) for low in range(0, len(rows), step))
