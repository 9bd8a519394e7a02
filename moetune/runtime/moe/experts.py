"""The local experts: their parameters, and their forward and backward on one chunk's rows.

Every memory policy computes here, between a chunk's dispatch and its combine.

R rows, D model width, H hidden width, E local experts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moetune.domain.layer import Activation, LayerShape
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

_GOLDEN = 0x9E3779B97F4A7C15
_SEED_BITS = 63

Buffers = Mapping[str, torch.Tensor]


class Experts(nn.Module):
    """Parameters of the local experts, rank r of P holding experts r·E/P … (r+1)·E/P − 1."""

    w1: nn.Parameter
    w2: nn.Parameter
    b1: nn.Parameter | None
    b2: nn.Parameter | None
    w3: nn.Parameter | None

    def __init__(
        self,
        layer: LayerShape,
        *,
        local_experts: int,
        bias: bool,
        is_replicated: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.local_experts = local_experts
        wide, narrow = (layer.d_model, layer.d_hidden), (layer.d_hidden, layer.d_model)
        gated = layer.activation == "swiglu"
        shapes: dict[str, tuple[int, ...] | None] = {
            "w1": wide,
            "b1": wide[1:] if bias and not gated else None,
            "w2": narrow,
            "b2": narrow[1:] if bias and not gated else None,
            "w3": wide if gated else None,
        }
        for name, shape in shapes.items():
            value = None
            if shape is not None:
                empty = torch.empty((local_experts, *shape), device=device, dtype=dtype)
                value = nn.Parameter(empty)
                # Data parallel wrappers must not average what only this rank holds.
                value.allreduce = is_replicated  # type: ignore[attr-defined] # a tag wrappers read
            self.register_parameter(name, value)

    def reset(self, seed: int, first_expert: int) -> None:
        """Draw every expert from its own generator: the same values for any number of ranks.

        Weights and biases are uniform within ±1/√fan_in, as those of `nn.Linear`.
        """
        for local in range(self.local_experts):
            generator = torch.Generator()
            mixed = seed ^ ((first_expert + local + 1) * _GOLDEN)
            generator.manual_seed(mixed & (2**_SEED_BITS - 1))
            for name, parameter in self.named_parameters():
                fan_in = self.w2.shape[1] if name.endswith("2") else self.w1.shape[1]
                bound = 1 / math.sqrt(fan_in)
                values = torch.empty(parameter.shape[1:], dtype=torch.float64)
                values.uniform_(-bound, bound, generator=generator)
                with torch.no_grad():
                    parameter[local].copy_(values)

    def in_dtype(self, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...]:
        """Return w1, b1, w2, b2 and w3 in the dtype of a step."""
        parameters = (self.w1, self.b1, self.w2, self.b2, self.w3)
        return tuple(None if each is None else each.to(dtype) for each in parameters)


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
    def of(cls, activation: Activation, parameters: Sequence[Any]) -> "ExpertWeights":
        """Return the weights from w1, b1, w2, b2 and w3."""
        w1, b1, w2, b2, w3 = parameters
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
        self, weights: ExpertWeights, degree: int, buffers: Buffers, tracker: MemoryTracker
    ) -> None:
        self._activation: Activation = weights.activation
        self._w1_T, self._w2_T = weights.w1.transpose(1, 2), weights.w2.transpose(1, 2)
        self._w3_T = None if weights.w3 is None else weights.w3.transpose(1, 2)
        self._buffers = buffers
        self._sums = [
            None if each is None else GradientSum(each, degree, tracker)
            for each in weights.parameters
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
        """Return the parameters' gradients, once: each sum is freed as its gradient is made."""
        self._sums.reverse()
        sums = (self._sums.pop() for _ in range(len(self._sums)))
        return tuple(None if each is None else each.total() for each in sums)


def _add_gemm(into: GradientSum | None, x: torch.Tensor, y: torch.Tensor, blocks: Blocks) -> None:
    if into is not None:
        into.add_gemm(x, y, blocks)


def _add_rows(into: GradientSum | None, y: torch.Tensor, blocks: Blocks) -> None:
    if into is not None:
        into.add_rows(y, blocks)
