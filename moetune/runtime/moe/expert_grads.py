"""The local experts' backward on the rows of one part of a chunk, and their parameters' gradients.

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

from moetune.runtime.moe.activations import activate, activate_again, activation_grad_
from moetune.runtime.moe.experts import (
    Buffers,
    ExpertWeights,
    SavedActivations,
    WantedGrads,
)
from moetune.runtime.moe.pairs import dots
from moetune.runtime.moe.products import RowPart, multiply
from moetune.runtime.moe.weight_grads import GradientSum, KeptRows
from moetune.runtime.moe.workspace import MemoryTracker

_NAMES = ("w1", "b1", "w2", "b2", "w3")


class CombineWeights:
    """The combine weights of one chunk's rows where the experts apply them, and their gradients.

    The gradient of a weight is ⟨dy, o⟩. Policies that do not save the results o compute it at the
    expert, as ⟨dy·W₂ᵀ, h⟩ + ⟨dy, b₂⟩, which is equal.

    Args:
        weights_R1, grads_R1: (R, 1).
        b2: (E, D), None without biases.
    """

    def __init__(
        self, weights_R1: torch.Tensor, grads_R1: torch.Tensor, b2: torch.Tensor | None
    ) -> None:
        self._weights_R1, self._grads_R1, self._b2 = weights_R1, grads_R1, b2

    def apply(
        self,
        grad: torch.Tensor,
        hidden: torch.Tensor,
        grad_hidden: torch.Tensor,
        part: RowPart,
    ) -> None:
        """Write the weights' gradients, then weight both gradients in place.

        Args:
            grad: (R, D), dy of every row.
            grad_hidden: (R, H), dy·W₂ᵀ.
        """
        dots(grad_hidden.unsqueeze(1), hidden, self._grads_R1)
        if self._b2 is not None:
            self._add_bias(grad, self._b2, part)
        grad.mul_(self._weights_R1)
        grad_hidden.mul_(self._weights_R1)

    def _add_bias(self, grad: torch.Tensor, b2: torch.Tensor, part: RowPart) -> None:
        if part.experts_RE is not None:
            dots_RE = (grad @ b2.T).mul_(part.experts_RE)
            self._grads_R1 += dots_RE.sum(dim=1, keepdim=True)
            return
        for expert, low, high in part.blocks:
            self._grads_R1[low:high] += grad[low:high] @ b2[expert].unsqueeze(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """All rows of a step, whose gradients of weights are made when every chunk has been sent back.

    Args:
        inputs_RD, grads_RD: all rows, and the gradients that arrive for them.
        part: all rows, by expert.
        kept: takes the other factors.
        is_grouped: one kernel multiplies the rows of all experts.
    """

    inputs_RD: torch.Tensor
    grads_RD: torch.Tensor
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
        self._saved: list[tuple[RowPart, SavedActivations]] = []

    def run(
        self,
        grad: torch.Tensor,
        inputs: torch.Tensor,
        saved: SavedActivations,
        part: RowPart,
        out: torch.Tensor | None,
        *,
        combine_weights: CombineWeights | None = None,
        saved_is_free: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """Return the gradient of the inputs, in `out` if there is one, which may be `grad`.

        Args:
            grad: (R, D), of the experts' results; with `combine_weights`, of the weighted ones.
            inputs: (R, D), the rows that the experts received.
            saved_is_free: called after the last read of `saved`; not of a whole step.
        """
        weights, (pre, gate) = self._weights, (saved.pre_RH, saved.gate_RH)
        hidden, grad_hidden, grad_both = self._memory(saved)
        grad_hidden = multiply(grad, self._w2_T, part, grad_hidden)
        if hidden is None:
            self._saved.append((part, saved))
        else:
            if combine_weights is not None:
                combine_weights.apply(grad, hidden, grad_hidden, part)
            self._add("w2", "b2", hidden, grad, part)
        if gate is not None and self._w3_T is not None:
            room = torch.empty_like(pre) if hidden is None else hidden
            grad_gate = activate(pre, None, "silu", room).mul_(grad_hidden)
            grad_hidden.mul_(gate)
            self._add("w3", "", inputs, grad_gate, part)
            out = multiply(grad_gate, self._w3_T, part, out)
        if weights.form is None:
            grad_pre = activation_grad_(grad_hidden, pre, weights.activation)
        else:
            grad_pre = weights.form.grad(pre, grad_hidden, grad_both)
        saved_is_free()
        self._add("w1", "b1", inputs, grad_pre, part)
        return multiply(grad_pre, self._w1_T, part, out, adds=gate is not None)

    def finish(self) -> None:
        """Multiply what was kept of a whole step, one parameter after another."""
        if self._whole is None:
            return
        inputs_RD, grads_RD = self._whole.inputs_RD, self._whole.grads_RD
        part, kept = self._whole.part, self._whole.kept
        if self._make.keys() & {"w1", "b1", "w3"}:
            inputs = kept.by_expert(inputs_RD)
            for matrix, bias in (("w1", "b1"), ("w3", "")):
                if self._make.keys() & {matrix, bias}:
                    self._sum(matrix, bias, inputs, kept.take(matrix), part)
            del inputs
        if self._make.keys() & {"w2", "b2"}:
            for some, saved in self._saved:
                kept.keep("w2", self._hidden(saved), some)
            self._sum("w2", "b2", kept.take("w2"), kept.by_expert(grads_RD), part)
        self._saved.clear()

    def totals(self) -> tuple[torch.Tensor | None, ...]:
        """Return the wanted gradients, once: each sum is freed as its gradient is made."""
        sums = (self._sums.pop(name, None) for name in _NAMES)
        return tuple(None if each is None else each.total() for each in sums)

    def _memory(
        self, saved: SavedActivations
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
        """Return hidden values, and memory for the gradients of those and of the pre-activations.

        Of a whole step hidden values are made at the end, and their gradient by the kernel.
        """
        pre, form = saved.pre_RH, self._weights.form
        if self._whole is not None:
            return None, None, pre if form is None else torch.empty_like(pre)
        if form is None:
            return self._hidden(saved), self._buffers["grad hidden"][: len(pre)], pre
        hidden, grad_hidden, grad_both = form.backward_buffers(self._buffers, len(pre))
        return form.activate(pre, hidden), grad_hidden, grad_both

    def _hidden(self, saved: SavedActivations) -> torch.Tensor:
        """Return the hidden values again."""
        weights, buffers = self._weights, self._buffers
        if weights.form is not None:
            return weights.activate(saved, buffers)
        out = weights.hidden_memory(saved.pre_RH, buffers)
        return activate_again(saved.pre_RH, saved.gate_RH, weights.activation, out)

    def _add(self, matrix: str, bias: str, x: torch.Tensor, y: torch.Tensor, part: RowPart) -> None:
        """Add xᵀ y and the sum of y's rows to a matrix's and a bias's gradients, or keep y."""
        if self._whole is None:
            self._sum(matrix, bias, x, y, part)
        elif self._make.keys() & {matrix, bias}:
            self._whole.kept.keep(matrix, y, part)

    def _sum(self, matrix: str, bias: str, x: torch.Tensor, y: torch.Tensor, part: RowPart) -> None:
        for name in (matrix, bias):
            if name in self._make and name not in self._sums:
                self._sums[name] = self._make[name]()
        if matrix in self._make:
            self._sums[matrix].add_gemm(x, y, part)
        if bias in self._make:
            self._sums[bias].add_rows(y, part)
