"""The local experts' backward on the rows of one chunk, and their parameters' gradients.

`experts` has the forward, `weight_grads` the sums. Where a grouped kernel takes all experts, or
weights' products wait, their factors are kept, and each parameter has one product when everything
has been sent back: nothing is summed or rounded by chunk, and the products run while the last
results travel.

R rows, D model width, H hidden width, E local experts.
"""

from collections.abc import Callable

import torch

from moetune.runtime.moe.activations import activate, activation_grad_
from moetune.runtime.moe.experts import Buffers, ExpertWeights, SavedActivations, WantedGrads
from moetune.runtime.moe.pairs import dots, weigh_
from moetune.runtime.moe.products import RowPart, multiply
from moetune.runtime.moe.weight_grads import GradientSum, StepFactors, add_factors
from moetune.runtime.moe.workspace import MemoryTracker

_NAMES = ("w1", "b1", "w2", "b2", "w3")


class ExpertGrads:
    """The experts' backward; gradients of parameters are summed over chunks, or made at the end.

    Args:
        weights_R1: the combine weights of all rows.
        buffers: of `ExpertWeights.hidden_shapes`; none for a whole step.
        factors: of a whole step; None for sums over chunks.

    Attributes:
        weight_grads_R1: gradients of the combine weights.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        wanted: WantedGrads,
        weights_R1: torch.Tensor,
        num_chunks: int,
        buffers: Buffers,
        tracker: MemoryTracker,
        *,
        factors: StepFactors | None = None,
    ) -> None:
        self._weights, self._buffers, self._factors = weights, buffers, factors
        self._w1_T, self._w2_T = weights.w1.transpose(1, 2), weights.w2.transpose(1, 2)
        self._w3_T = None if weights.w3 is None else weights.w3.transpose(1, 2)
        self._weights_R1 = weights_R1
        self.weight_grads_R1 = tracker.empty("gradients of weights", weights_R1.shape, weights_R1)
        self._sums = {
            name: GradientSum(
                parameter, num_chunks, tracker, dtype=dtype, scale=wanted.scale, form=weights.form,
                is_whole=factors is not None,
            )
            for name, parameter, dtype in zip(
                _NAMES, weights.parameters, wanted.dtypes, strict=True
            )
            if parameter is not None and dtype is not None
        }  # fmt: skip

    def run(
        self,
        grad: torch.Tensor,
        inputs: torch.Tensor,
        saved: SavedActivations,
        part: RowPart,
        out: torch.Tensor | None,
        *,
        saved_is_free: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """Return the gradient of the inputs, in `out` if there is one, which may be `grad`.

        Args:
            grad: (R, D), of the experts' weighted results.
            inputs: (R, D), the rows that the experts received.
            saved_is_free: called after the last read of `saved`.
        """
        weights, (pre, gate) = self._weights, (saved.pre_RH, saved.gate_RH)
        hidden, grad_hidden, grad_both = self._memory(pre)
        grad_hidden = multiply(grad, self._w2_T, part, grad_hidden)
        hidden = weights.activate(saved, hidden)
        self._add_weight_grads(grad, hidden, grad_hidden, part)
        weights_R1 = self._weights_R1[part.rows]
        weigh_(grad_hidden, weights_R1)
        self._add("w2", "b2", weigh_(hidden, weights_R1), grad, part, weights_R1)
        if gate is not None and self._w3_T is not None:
            room = torch.empty_like(pre) if self._factors is not None else hidden
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
        """Multiply what was kept of a whole step."""
        if self._factors is not None:
            self._factors.add_to(self._sums)
            self._factors = None

    def totals(self) -> tuple[torch.Tensor | None, ...]:
        """Return the wanted gradients, once: each sum is freed as its gradient is made."""
        totals: list[torch.Tensor | None] = []
        for name in _NAMES:
            total = self._sums.pop(name, None)
            totals.append(None if total is None else total.total())
        return tuple(totals)

    def _memory(
        self, pre: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
        """Return memory for hidden values, their gradient, and that of pre-activations.

        Of a whole step all three are kept, or made by a kernel.
        """
        form, num_rows = self._weights.form, len(pre)
        if self._factors is not None:
            return None, None, pre if form is None else torch.empty_like(pre)
        if form is not None:
            return form.backward_buffers(self._buffers, num_rows)
        return self._buffers["hidden"][:num_rows], self._buffers["grad hidden"][:num_rows], pre

    def _add_weight_grads(
        self, grad: torch.Tensor, hidden: torch.Tensor, grad_hidden: torch.Tensor, part: RowPart
    ) -> None:
        """Write ⟨dy, h·W₂ + b₂⟩, as ⟨dy·W₂ᵀ, h⟩ + ⟨dy, b₂⟩: the results are not needed for it."""
        grads_R1, b2 = self.weight_grads_R1[part.rows], self._weights.b2
        dots(grad_hidden.unsqueeze(1), hidden, grads_R1)
        if b2 is None:
            return
        if part.experts_RE is not None:
            grads_R1 += (grad @ b2.T).mul_(part.experts_RE).sum(dim=1, keepdim=True)
            return
        for expert, low, high in part.blocks:
            grads_R1[low:high] += grad[low:high] @ b2[expert].unsqueeze(1)

    def _add(
        self,
        matrix: str,
        bias: str,
        x: torch.Tensor,
        y: torch.Tensor,
        part: RowPart,
        weights_R1: torch.Tensor | None = None,
    ) -> None:
        """Add to the gradients of a projection, or keep the factor that only this chunk has."""
        if self._factors is None:
            add_factors(self._sums, matrix, bias, x, y, part, weights_R1)
        elif matrix in self._sums or bias in self._sums:
            self._factors.keep(matrix, x if matrix == "w2" else y, part)
