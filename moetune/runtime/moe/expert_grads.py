"""The local experts' backward on the rows of one part of a chunk, and their parameters' gradients.

`experts` has the forward; `weight_grads` sums or defers the gradients of the parameters.

R rows, D model width, H hidden width, E local experts.
"""

from collections.abc import Callable

import torch

from moetune.domain.layer import Activation
from moetune.runtime.moe.activations import activate, activate_again, activation_grad_
from moetune.runtime.moe.experts import (
    Buffers,
    ExpertWeights,
    SavedActivations,
    WantedGrads,
    hidden_buffer,
)
from moetune.runtime.moe.pairs import dots
from moetune.runtime.moe.products import RowPart, multiply
from moetune.runtime.moe.weight_grads import (
    DeferredProducts,
    GradientSum,
    are_transposed,
)
from moetune.runtime.moe.workspace import MemoryTracker


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


class ExpertGrads:
    """The experts' backward; the parameters' gradients are summed over parts.

    Args:
        num_parts: of all chunks.
        buffers: of `ExpertWeights.hidden_shapes`.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        wanted: WantedGrads,
        num_parts: int,
        buffers: Buffers,
        tracker: MemoryTracker,
    ) -> None:
        self._activation: Activation = weights.activation
        self._form = weights.form
        self._w1_T, self._w2_T = weights.w1.transpose(1, 2), weights.w2.transpose(1, 2)
        self._w3_T = None if weights.w3 is None else weights.w3.transpose(1, 2)
        self._buffers = buffers
        self._sums = [
            None
            if each is None or dtype is None
            else GradientSum(
                each, num_parts, tracker, dtype=dtype, scale=wanted.scale, form=weights.form
            )
            for each, dtype in zip(weights.parameters, wanted.dtypes, strict=True)
        ]

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
            saved_is_free: called after the last read of `saved`.
        """
        sum_w1, sum_b1, sum_w2, sum_b2, sum_w3 = self._sums
        pre, gate = saved.pre_RH, saved.gate_RH
        if self._form is not None:
            hidden, grad_hidden, grad_both = self._form.backward_buffers(self._buffers, len(pre))
            self._form.activate(pre, hidden)
        else:
            out_hidden = hidden_buffer(pre, self._activation, self._buffers)
            hidden = activate_again(pre, gate, self._activation, out_hidden)
            grad_hidden = grad_both = self._buffers["grad hidden"][: len(pre)]
        multiply(grad, self._w2_T, part, grad_hidden)
        if combine_weights is not None:
            combine_weights.apply(grad, hidden, grad_hidden, part)
        _add_gemm(sum_w2, hidden, grad, part)
        _add_rows(sum_b2, grad, part)
        if gate is not None and self._w3_T is not None:
            grad_gate = activate(pre, None, "silu", hidden).mul_(grad_hidden)
            grad_hidden.mul_(gate)
            _add_gemm(sum_w3, inputs, grad_gate, part)
            out = multiply(grad_gate, self._w3_T, part, out)
        if self._form is not None:
            grad_pre = self._form.grad(pre, grad_hidden, grad_both)
        else:
            grad_pre = activation_grad_(grad_hidden, pre, self._activation)
        saved_is_free()
        _add_gemm(sum_w1, inputs, grad_pre, part)
        _add_rows(sum_b1, grad_pre, part)
        return multiply(grad_pre, self._w1_T, part, out, adds=gate is not None)

    def finish(self) -> None:
        """Do nothing: every part was summed."""

    def totals(self) -> tuple[torch.Tensor | None, ...]:
        """Return the wanted gradients, once: each sum is freed as its gradient is made."""
        self._sums.reverse()
        sums = (self._sums.pop() for _ in range(len(self._sums)))
        return tuple(None if each is None else each.total() for each in sums)


class DeferredGrads:
    """The experts' backward with grouped kernels; parameters have one product each, at the end.

    Args:
        inputs_RD, grads_RD: all rows of the step, and the gradients that arrive for them.
        products: of the parameters' gradients.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        wanted: WantedGrads,
        inputs_RD: torch.Tensor,
        grads_RD: torch.Tensor,
        products: DeferredProducts,
    ) -> None:
        self._weights, self._wanted, self._products = weights, wanted, products
        self._inputs_RD, self._grads_RD = inputs_RD, grads_RD
        self._saved: list[tuple[RowPart, SavedActivations]] = []
        self._totals: list[torch.Tensor | None] = []

    def run(
        self,
        grad: torch.Tensor,
        inputs: torch.Tensor,  # noqa: ARG002 - kept until the end
        saved: SavedActivations,
        part: RowPart,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the gradient of the inputs, and keep what the parameters' gradients need."""
        weights, (w1, b1, _, _, w3) = self._weights, self._wanted.dtypes
        pre, gate = saved.pre_RH, saved.gate_RH
        self._saved.append((part, saved))
        grad_hidden = multiply(grad, weights.w2.transpose(1, 2), part, None)
        through_gate = None
        if gate is not None and weights.w3 is not None:
            grad_gate = activate(pre, None, "silu", torch.empty_like(pre)).mul_(grad_hidden)
            grad_hidden.mul_(gate)
            if w3 is not None:
                self._products.keep("gate", grad_gate, part)
            through_gate = multiply(grad_gate, weights.w3.transpose(1, 2), part, None)
        if weights.form is None:
            grad_pre = activation_grad_(grad_hidden, pre, weights.activation)
        else:
            grad_pre = weights.form.grad(pre, grad_hidden, torch.empty_like(pre))
        if w1 is not None or b1 is not None:
            self._products.keep("pre", grad_pre, part)
        result = multiply(grad_pre, weights.w1.transpose(1, 2), part, None)
        if through_gate is not None:
            result.add_(through_gate)
        return result if out is None else out.copy_(result)

    def finish(self) -> None:
        """Multiply what was kept, one parameter after another."""
        products = self._products
        w1, b1, w2, b2, w3 = self._wanted.dtypes
        totals: list[torch.Tensor | None] = [None] * 5
        if w1 is not None or w3 is not None:
            inputs = products.by_expert(self._inputs_RD)
            if w1 is not None:
                totals[0] = self._matrix(inputs, products.kept("pre"), w1)
            if w3 is not None:
                totals[4] = self._matrix(inputs, products.kept("gate"), w3)
            del inputs
        if b1 is not None:
            totals[1] = products.rows(products.kept("pre"), b1)
        if w2 is not None or b2 is not None:
            grads = products.by_expert(self._grads_RD)
            if b2 is not None:
                totals[3] = products.rows(grads, b2)
            if w2 is not None:
                if self._weights.form is not None:
                    products.drop("pre")  # which is wider than the hidden values
                for part, saved in self._saved:
                    products.keep("pre", self._hidden(saved), part)
                totals[2] = self._matrix(products.kept("pre"), grads, w2)
        products.release()
        self._saved.clear()
        self._totals = totals

    def totals(self) -> tuple[torch.Tensor | None, ...]:
        """Return the wanted gradients."""
        return tuple(self._totals)

    def _hidden(self, saved: SavedActivations) -> torch.Tensor:
        if self._weights.form is not None:
            return self._weights.activate(saved, {})
        activation = self._weights.activation
        out = hidden_buffer(saved.pre_RH, activation, {})
        return activate_again(saved.pre_RH, saved.gate_RH, activation, out)

    def _matrix(self, x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return xᵀ y of every expert's rows, in the layout of the parameter."""
        form = self._weights.form
        if not are_transposed(self._weights.w1, form):
            return self._products.matrix(x, y, dtype)
        made = self._products.matrix(y, x, dtype)
        return made.mT if form is None else made


ParameterGrads = ExpertGrads | DeferredGrads
"""The experts' backward, part by part, and what becomes of the parameters' gradients.

`run` returns the gradient of a part's inputs, `finish` does what is left when every chunk's results
are on their way, and `totals` returns the wanted gradients, once.
"""


def _add_gemm(into: GradientSum | None, x: torch.Tensor, y: torch.Tensor, part: RowPart) -> None:
    if into is not None:
        into.add_gemm(x, y, part)


def _add_rows(into: GradientSum | None, y: torch.Tensor, part: RowPart) -> None:
    if into is not None:
        into.add_rows(y, part)
