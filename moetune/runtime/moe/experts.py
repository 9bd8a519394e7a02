"""The local experts' forward and backward on one chunk's rows.

Every memory policy computes here, between a chunk's dispatch and its combine. The parameters are in
`expert_module`.

R rows, D model width, H hidden width, E local experts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moetune.domain.layer import Activation
from moetune.runtime.moe.kernels import (
    Blocks,
    CombineWeights,
    GradientSum,
    activate,
    activate_again,
    activation_grad_,
    expert_gemm,
)
from moetune.runtime.moe.workspace import MemoryTracker, Shape

Buffers = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedActivations:
    """The up-projections' results, of a step or a chunk, which the backward pass needs.

    Rows are ordered by piece and local expert, so that chunks of either phase are slices.

    Args:
        pre_RH: x·W₁ + b₁; relu replaces it by its result, which serves its derivative as well.
        gate_RH: x·W₃ for swiglu, else None.
    """

    pre_RH: torch.Tensor
    gate_RH: torch.Tensor | None

    def chunk(self, rows: slice) -> "SavedActivations":
        """Return a chunk's slice."""
        gate_RH = None if self.gate_RH is None else self.gate_RH[rows]
        return SavedActivations(pre_RH=self.pre_RH[rows], gate_RH=gate_RH)


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedGrads:
    """The gradients that a backward pass makes of w1, b1, w2, b2 and w3.

    Args:
        dtypes: of each gradient, the parameter's own; None where none is wanted, because the
            parameter is frozen or does not exist.
        scale: factor of all of them.
    """

    dtypes: tuple[torch.dtype | None, ...] = (None,) * 5
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """The local experts' parameters in the dtype of a step, and their forward on a chunk.

    Args:
        w1, w3: (E, D, H).
        w2: (E, H, D).
    """

    activation: Activation
    w1: torch.Tensor
    b1: torch.Tensor | None
    w2: torch.Tensor
    b2: torch.Tensor | None
    w3: torch.Tensor | None

    @classmethod
    def of(
        cls, activation: Activation, parameters: Sequence[Any], dtype: torch.dtype
    ) -> "ExpertWeights":
        """Return the weights from w1, b1, w2, b2 and w3, cast where they have another dtype."""
        w1, b1, w2, b2, w3 = (
            each if each is None or each.dtype == dtype else each.to(dtype) for each in parameters
        )
        return cls(activation=activation, w1=w1, b1=b1, w2=w2, b2=b2, w3=w3)

    @property
    def parameters(self) -> tuple[torch.Tensor | None, ...]:
        """w1, b1, w2, b2 and w3, the order of the autograd function."""
        return self.w1, self.b1, self.w2, self.b2, self.w3

    @property
    def d_hidden(self) -> int:
        """H."""
        return self.w1.shape[2]

    def hidden_shapes(self, num_rows: int, *, backward: bool) -> dict[str, Shape]:
        """Return the shapes of a phase's buffers besides `SavedActivations`, for one chunk.

        Args:
            num_rows: of the largest chunk.
        """
        names = () if self.activation == "relu" else ("hidden",)
        names = (*names, "grad hidden") if backward else names
        return dict.fromkeys(names, (num_rows, self.d_hidden))

    def save_activations(
        self, num_rows: int, like: torch.Tensor, tracker: MemoryTracker
    ) -> SavedActivations:
        """Return uninitialised memory for all rows of a step."""
        shape = num_rows, self.d_hidden
        return SavedActivations(
            pre_RH=tracker.empty("the experts' pre-activations", shape, like),
            gate_RH=None if self.w3 is None else tracker.empty("the experts' gates", shape, like),
        )

    def project_up(self, rows: torch.Tensor, into: SavedActivations, blocks: Blocks) -> None:
        """Write x·W₁ + b₁, and x·W₃ for swiglu, of the rows (R, D)."""
        expert_gemm(rows, self.w1, blocks, into.pre_RH, self.b1)
        if self.w3 is not None and into.gate_RH is not None:
            expert_gemm(rows, self.w3, blocks, into.gate_RH)

    def activate(self, saved: SavedActivations, buffers: Buffers) -> torch.Tensor:
        """Return the hidden values (R, H), in the buffer "hidden" or, for relu, in place."""
        out = hidden_buffer(saved.pre_RH, self.activation, buffers)
        return activate(saved.pre_RH, saved.gate_RH, self.activation, out)

    def project_down(self, hidden: torch.Tensor, out: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """Return h·W₂ + b₂ in `out` (R, D)."""
        return expert_gemm(hidden, self.w2, blocks, out, self.b2)


def hidden_buffer(pre: torch.Tensor, activation: Activation, buffers: Buffers) -> torch.Tensor:
    """Return the buffer for act(pre): for relu, which works in place, `pre` itself."""
    return pre if activation == "relu" else buffers["hidden"][: len(pre)]


class ExpertGrads:
    """The experts' backward, chunk by chunk; the parameters' gradients are summed over chunks.

    Args:
        buffers: of `ExpertWeights.hidden_shapes`.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        wanted: WantedGrads,
        degree: int,
        buffers: Buffers,
        tracker: MemoryTracker,
    ) -> None:
        self._activation: Activation = weights.activation
        self._w1_T, self._w2_T = weights.w1.transpose(1, 2), weights.w2.transpose(1, 2)
        self._w3_T = None if weights.w3 is None else weights.w3.transpose(1, 2)
        self._buffers = buffers
        self._sums = [
            None
            if each is None or dtype is None
            else GradientSum(each, degree, tracker, dtype=dtype, scale=wanted.scale)
            for each, dtype in zip(weights.parameters, wanted.dtypes, strict=True)
        ]

    def run(
        self,
        grad: torch.Tensor,
        inputs: torch.Tensor,
        saved: SavedActivations,
        blocks: Blocks,
        out: torch.Tensor,
        *,
        combine_weights: CombineWeights | None = None,
        saved_is_free: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """Return the gradient of the inputs in `out`, which may be `grad`.

        Args:
            grad: (R, D), of the experts' results; with `combine_weights`, of the weighted ones.
            inputs: (R, D), the rows that the experts received.
            saved_is_free: called after the last read of `saved`.
        """
        sum_w1, sum_b1, sum_w2, sum_b2, sum_w3 = self._sums
        pre, gate = saved.pre_RH, saved.gate_RH
        out_hidden = hidden_buffer(pre, self._activation, self._buffers)
        hidden = activate_again(pre, gate, self._activation, out_hidden)
        grad_hidden = self._buffers["grad hidden"][: len(pre)]
        expert_gemm(grad, self._w2_T, blocks, grad_hidden)
        if combine_weights is not None:
            combine_weights.apply(grad, hidden, grad_hidden, blocks)
        _add_gemm(sum_w2, hidden, grad, blocks)
        _add_rows(sum_b2, grad, blocks)
        if gate is not None and self._w3_T is not None:
            grad_gate = activate(pre, None, "silu", hidden).mul_(grad_hidden)
            grad_hidden.mul_(gate)
            _add_gemm(sum_w3, inputs, grad_gate, blocks)
            expert_gemm(grad_gate, self._w3_T, blocks, out)
        grad_pre = activation_grad_(grad_hidden, pre, self._activation)
        saved_is_free()
        _add_gemm(sum_w1, inputs, grad_pre, blocks)
        _add_rows(sum_b1, grad_pre, blocks)
        return expert_gemm(grad_pre, self._w1_T, blocks, out, adds=gate is not None)

    def totals(self) -> tuple[torch.Tensor | None, ...]:
        """Return the wanted gradients, once: each sum is freed as its gradient is made."""
        self._sums.reverse()
        sums = (self._sums.pop() for _ in range(len(self._sums)))
        return tuple(None if each is None else each.total() for each in sums)


def _add_gemm(into: GradientSum | None, x: torch.Tensor, y: torch.Tensor, blocks: Blocks) -> None:
    if into is not None:
        into.add_gemm(x, y, blocks)


def _add_rows(into: GradientSum | None, y: torch.Tensor, blocks: Blocks) -> None:
    if into is not None:
        into.add_rows(y, blocks)
