"""The local experts' backward on the rows of one chunk, and their parameters' gradients.

`experts` has the forward, `weight_grads` the sums. Where a grouped kernel takes
all experts, or weights' products wait, their factors are kept, and each parameter has one product
when everything has been sent back: nothing is summed or rounded by chunk, and the products run
while the last results travel.

R rows, D model width, H hidden width, E local experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from moetune.runtime.moe.activations import activate, activation_grad_
from moetune.runtime.moe.experts import (
    Buffers,
    ExpertWeights,
    SavedActivations,
    WantedGrads,
)
from moetune.runtime.moe.pairs import CombineWeights, weigh_
from moetune.runtime.moe.products import RowPart, multiply
from moetune.runtime.moe.weight_grads import GradientSum, KeptRows
from moetune.runtime.moe.workspace import MemoryTracker

_NAMES = ("w1", "b1", "w2", "b2", "w3")


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """All rows of a step, whose gradients of weights are made when every chunk has been sent back.

    Args:
        inputs_RD, grads_RD: all rows, and the gradients that arrive for them.
        weights_R1: the combine weights.
        part: all rows, by expert.
        kept: takes the other factors.
        is_grouped: one kernel multiplies the rows of all experts.
    """

    inputs_RD: torch.Tensor
    grads_RD: torch.Tensor
    weights_R1: torch.Tensor
    part: RowPart
    kept: KeptRows
    is_grouped: bool


class ExpertGrads:
    """The experts' backward; gradients of parameters are summed over parts, or made at the end.

    Args:
        num_parts: of all chunks.
        buffers: of `ExpertWeights.hidden_shapes`; none for a whole step.
        whole: None for sums over parts.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        wanted: WantedGrads,
        num_parts: int,
        buffers: Buffers,
        tracker: MemoryTracker,
        *,
        whole: WholeStep | None = None,
    ) -> None:
        self._weights, self._buffers, self._whole = weights, buffers, whole
        self._w1_T, self._w2_T = weights.w1.transpose(1, 2), weights.w2.transpose(1, 2)
        self._w3_T = None if weights.w3 is None else weights.w3.transpose(1, 2)
        self._make = {
            name: partial(
                GradientSum, parameter, num_parts if whole is None else 1, tracker, dtype=dtype,
                scale=wanted.scale, form=weights.form,
                is_grouped=whole is not None and whole.is_grouped,
            )
            for name, parameter, dtype in zip(
                _NAMES, weights.parameters, wanted.dtypes, strict=True
            )
            if parameter is not None and dtype is not None
        }  # fmt: skip
        self._sums = {} if whole is not None else {name: self._make[name]() for name in self._make}

    def run(
        self,
        grad: torch.Tensor,
        inputs: torch.Tensor,
        saved: SavedActivations,
        combine_weights: CombineWeights,
        part: RowPart,
        out: torch.Tensor | None,
        *,
        saved_is_free: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """Return the gradient of the inputs, in `out` if there is one, which may be `grad`.

        Args:
            grad: (R, D), of the experts' weighted results.
            inputs: (R, D), the rows that the experts received.
            combine_weights: whose gradients are written.
            saved_is_free: called after the last read of `saved`.
        """
        weights, (pre, gate) = self._weights, (saved.pre_RH, saved.gate_RH)
        hidden, grad_hidden, grad_both = self._memory(pre)
        grad_hidden = multiply(grad, self._w2_T, part, grad_hidden)
        hidden = weights.activate(saved, hidden)
        combine_weights.write_grads(grad, hidden, grad_hidden, weights.b2, part)
        weights_R1 = combine_weights.values_R1
        weigh_(grad_hidden, weights_R1)
        self._add_second(weigh_(hidden, weights_R1), grad, weights_R1, part)
        if gate is not None and self._w3_T is not None:
            room = torch.empty_like(pre) if self._whole is not None else hidden
            grad_gate = activate(pre, None, "silu", room).mul_(grad_hidden)
            grad_hidden.mul_(gate)
            self._add_first("w3", "", inputs, grad_gate, part)
            out = multiply(grad_gate, self._w3_T, part, out)
        if weights.form is None:
            grad_pre = activation_grad_(grad_hidden, pre, weights.activation)
        else:
            grad_pre = weights.form.grad(pre, grad_hidden, grad_both)
        saved_is_free()
        self._add_first("w1", "b1", inputs, grad_pre, part)
        return multiply(grad_pre, self._w1_T, part, out, adds=gate is not None)

    def finish(self) -> None:
        """Multiply what was kept of a whole step, one parameter after another."""
        if self._whole is None:
            return
        whole, part, kept = self._whole, self._whole.part, self._whole.kept
        if self._wants("w1", "b1", "w3"):
            inputs = kept.by_expert(whole.inputs_RD)
            for matrix, bias in (("w1", "b1"), ("w3", "")):
                if self._wants(matrix, bias):
                    self._sum(matrix, bias, inputs, kept.take(matrix), part)
            del inputs
        if self._wants("w2", "b2"):
            grads, weights_R1 = kept.by_expert(whole.grads_RD), kept.by_expert(whole.weights_R1)
            self._sum("w2", "b2", kept.take("w2"), grads, part, weights_R1)

    def totals(self) -> tuple[torch.Tensor | None, ...]:
        """Return the wanted gradients, once: each sum is freed as its gradient is made."""
        sums = (self._sums.pop(name, None) for name in _NAMES)
        return tuple(None if each is None else each.total() for each in sums)

    def _memory(
        self, pre: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
        """Return memory for hidden values, their gradient, and that of pre-activations.

        Of a whole step all three are kept, or made by a kernel.
        """
        form, num_rows = self._weights.form, len(pre)
        if self._whole is not None:
            return None, None, pre if form is None else torch.empty_like(pre)
        if form is not None:
            return form.backward_buffers(self._buffers, num_rows)
        return self._buffers["hidden"][:num_rows], self._buffers["grad hidden"][:num_rows], pre

    def _wants(self, *names: str) -> bool:
        """Return whether one of these gradients is wanted."""
        return not self._make.keys().isdisjoint(names)

    def _add_first(
        self, matrix: str, bias: str, inputs: torch.Tensor, grad: torch.Tensor, part: RowPart
    ) -> None:
        """Add to the gradients of an up-projection, or keep what its product needs."""
        if self._whole is None:
            self._sum(matrix, bias, inputs, grad, part)
        elif self._wants(matrix, bias):
            self._whole.kept.keep(matrix, grad, part)

    def _add_second(
        self, hidden: torch.Tensor, grad: torch.Tensor, weights_R1: torch.Tensor, part: RowPart
    ) -> None:
        """Add to the gradients of the down-projection, or keep what its product needs.

        Args:
            hidden: weighted.
        """
        if self._whole is None:
            self._sum("w2", "b2", hidden, grad, part, weights_R1)
        elif self._wants("w2", "b2"):
            self._whole.kept.keep("w2", hidden, part)

    def _sum(
        self,
        matrix: str,
        bias: str,
        x: torch.Tensor,
        y: torch.Tensor,
        part: RowPart,
        weights_R1: torch.Tensor | None = None,
    ) -> None:
        """Add xᵀ y to a matrix's gradient, and the sum of y's weighted rows to a bias's."""
        for name in (matrix, bias):
            if name in self._make and name not in self._sums:
                self._sums[name] = self._make[name]()
        if matrix in self._make:
            self._sums[matrix].add_gemm(x, y, part)
        if bias in self._make:
            self._sums[bias].add_rows(y, part, weights_R1)
