"""The local experts on the rows of one chunk, forward and backward.

Every memory policy computes here, between a chunk's dispatch and its combine. The parameters are in
`expert_module`, sums of their gradients in `weight_grads`. If the caller gives no memory for a
result, a grouped kernel allocates it.

R rows, D model width, H hidden width, E local experts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moetune.domain.layer import Activation
from moetune.runtime.moe.activations import FusedForm, activate, derive
from moetune.runtime.moe.pairs import dots, weigh_
from moetune.runtime.moe.products import RowPart, multiply
from moetune.runtime.moe.weight_grads import GradientSum, StepFactors, add_factors
from moetune.runtime.moe.workspace import Shape, empty

_NAMES = ("w1", "b1", "w2", "b2", "w3")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedActivations:
    """The up-projections' results for a step or a chunk, saved for the backward pass.

    Rows are ordered by chunk and local expert, so that chunks are slices.

    Args:
        pre_RH: x·W₁ + b₁; it is twice as wide for fused experts.
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
    """The local experts' parameters in a step's dtype, and their forward pass on a chunk.

    Args:
        w1, w3: (E, D, H); a fused w1 is (E, D, 2·H).
        w2: (E, H, D).
        form: form of fused experts, used instead of the activation; None for other experts.
    """

    activation: Activation
    w1: torch.Tensor
    b1: torch.Tensor | None
    w2: torch.Tensor
    b2: torch.Tensor | None
    w3: torch.Tensor | None
    form: FusedForm | None = None

    @classmethod
    def of(
        cls,
        activation: Activation,
        parameters: Sequence[Any],
        dtype: torch.dtype,
        form: FusedForm | None,
    ) -> "ExpertWeights":
        """Return the weights made of w1, b1, w2, b2 and w3, cast to `dtype`.

        Args:
            parameters: w1, b1, w2, b2 and w3; for fused experts in the layout of their form.
        """
        cast: list[Any] = [value if value is None else value.to(dtype) for value in parameters]
        w1, b1, w2, b2, w3 = cast
        if form is not None:
            w1, w2 = form.stored(w1), form.stored(w2)
        return cls(activation=activation, w1=w1, b1=b1, w2=w2, b2=b2, w3=w3, form=form)

    @property
    def parameters(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors w1, b1, w2, b2 and w3, in the order of the autograd function."""
        return self.w1, self.b1, self.w2, self.b2, self.w3

    @property
    def d_hidden(self) -> int:
        """The hidden width H."""
        return self.w2.shape[1]

    @property
    def saved_widths(self) -> dict[str, int]:
        """The widths of `SavedActivations`, by name."""
        widths = {"pre": self.w1.shape[2]}
        return widths if self.w3 is None else widths | {"gate": self.w3.shape[2]}

    def hidden_shapes(self, num_rows: int, *, backward: bool) -> dict[str, Shape]:
        """Return the shapes of one chunk's buffers in a phase, without `SavedActivations`.

        Args:
            num_rows: rows of the largest chunk.
        """
        if self.form is not None and backward:
            return self.form.backward_shapes(num_rows, self.d_hidden)
        names = ("hidden", "grad hidden") if backward else ("hidden",)
        return dict.fromkeys(names, (num_rows, self.d_hidden))

    def save_activations(self, num_rows: int, like: torch.Tensor) -> SavedActivations:
        """Return uninitialised memory for all rows of a step."""
        widths = self.saved_widths
        pre_RH = empty("the experts' pre-activations", (num_rows, widths["pre"]), like)
        gate_RH = None
        if "gate" in widths:
            gate_RH = empty("the experts' gates", (num_rows, widths["gate"]), like)
        return SavedActivations(pre_RH=pre_RH, gate_RH=gate_RH)

    def project_up(
        self, rows: torch.Tensor, into: SavedActivations | None, part: RowPart
    ) -> SavedActivations:
        """Return x·W₁ + b₁ of the rows (R, D), and x·W₃ for swiglu."""
        pre, gate = (None, None) if into is None else (into.pre_RH, into.gate_RH)
        return SavedActivations(
            pre_RH=multiply(rows, self.w1, part, pre, self.b1),
            gate_RH=None if self.w3 is None else multiply(rows, self.w3, part, gate),
        )

    def activate(self, saved: SavedActivations, out: torch.Tensor | None) -> torch.Tensor:
        """Return the hidden values h (R, H), in `out` if it is given."""
        pre = saved.pre_RH
        out = pre.new_empty((len(pre), self.d_hidden)) if out is None else out[: len(pre)]
        if self.form is not None:
            return self.form.activate(pre, out)
        return activate(pre, saved.gate_RH, self.activation, out)

    def project_up_and_activate(
        self, rows: torch.Tensor, part: RowPart
    ) -> tuple[SavedActivations, torch.Tensor]:
        """Return what `project_up` and `activate` return for the rows (R, D), fused if possible."""
        if self.form is not None and self.is_fused(part):
            pre, hidden = part.kernel.swiglu_up(rows, self.w1, part)
            return SavedActivations(pre_RH=pre, gate_RH=None), hidden
        saved = self.project_up(rows, None, part)
        return saved, self.activate(saved, None)

    def is_fused(self, part: RowPart) -> bool:
        """Return whether the part's kernel fuses the activation that these experts have."""
        if self.form is None or not self.form.is_plain_swiglu or self.b1 is not None:
            return False
        has_rows = part.rows.stop > part.rows.start
        return has_rows and part.ends_E is not None and part.kernel.fuses_swiglu

    def project_down(
        self,
        hidden: torch.Tensor,
        weights_R1: torch.Tensor,
        out: torch.Tensor | None,
        part: RowPart,
    ) -> torch.Tensor:
        """Return weight · (h·W₂ + b₂) (R, D).

        Args:
            hidden: h; it is weighted in place, so that no row of width D is touched for the weight.
            weights_R1: the combine weights.
        """
        return multiply(weigh_(hidden, weights_R1), self.w2, part, out, self.b2, weights_R1)


class ExpertGrads:
    """The experts' backward; parameters' gradients are summed by chunk, or computed at the end.

    Args:
        dtypes: dtypes of the gradients of w1, b1, w2, b2 and w3; None for a gradient that is not
            wanted, because the parameter is frozen or does not exist.
        weights_R1: the combine weights of all rows.
        buffers: buffers of `ExpertWeights.hidden_shapes`; empty for a whole step.
        scale: factor of all parameters' gradients.
        factors: factors kept for a whole step; None for sums over chunks.

    Attributes:
        weight_grads_R1: gradients of the combine weights.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        dtypes: Sequence[torch.dtype | None],
        weights_R1: torch.Tensor,
        num_chunks: int,
        buffers: Mapping[str, torch.Tensor],
        *,
        scale: float,
        factors: StepFactors | None = None,
    ) -> None:
        self._weights, self._buffers, self._factors = weights, buffers, factors
        self._w1_T, self._w2_T = weights.w1.transpose(1, 2), weights.w2.transpose(1, 2)
        self._w3_T = None if weights.w3 is None else weights.w3.transpose(1, 2)
        self._weights_R1 = weights_R1
        self.weight_grads_R1 = empty("gradients of weights", weights_R1.shape, weights_R1)
        self._sums = {
            name: GradientSum(
                parameter, num_chunks, dtype=dtype, scale=scale, form=weights.form,
                is_whole=factors is not None,
            )
            for name, parameter, dtype in zip(_NAMES, weights.parameters, dtypes, strict=True)
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
        """Return the inputs' gradient, in `out` if it is given; `out` may be `grad`.

        Args:
            grad: gradient (R, D) of the experts' weighted results.
            inputs: the rows (R, D) that the experts received.
            saved_is_free: called after the last read of `saved`.
        """
        weights, (pre, gate) = self._weights, (saved.pre_RH, saved.gate_RH)
        if self._factors is not None and weights.form is not None and weights.is_fused(part):
            return self._run_fused(grad, inputs, pre, part, out)
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
            function = "silu" if weights.activation == "swiglu" else weights.activation
            grad_pre = derive(function, grad_hidden, pre, grad_hidden)
        else:
            grad_pre = weights.form.grad(pre, grad_hidden, grad_both)
        saved_is_free()
        self._add("w1", "b1", inputs, grad_pre, part)
        return multiply(grad_pre, self._w1_T, part, out, adds=gate is not None)

    def _run_fused(
        self,
        grad: torch.Tensor,
        inputs: torch.Tensor,
        pre: torch.Tensor,
        part: RowPart,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the result of `run`, by a kernel that fuses the activation's gradient."""
        weights, weights_R1 = self._weights, self._weights_R1[part.rows]
        grad_pre, hidden, weight_grads_R1 = part.kernel.swiglu_down_backward(
            grad, weights.w2, pre, weights_R1, part
        )
        self.weight_grads_R1[part.rows] = weight_grads_R1
        self._add("w2", "b2", hidden, grad, part, weights_R1)
        self._add("w1", "b1", inputs, grad_pre, part)
        return multiply(grad_pre, self._w1_T, part, out)

    def finish(self) -> None:
        """Multiply the factors that were kept for a whole step."""
        if self._factors is not None:
            self._factors.add_to(self._sums)
            self._factors = None

    def totals(self) -> tuple[torch.Tensor | None, ...]:
        """Return the wanted gradients, only once: each sum is freed when its gradient is made."""
        totals: list[torch.Tensor | None] = []
        for name in _NAMES:
            total = self._sums.pop(name, None)
            totals.append(None if total is None else total.total())
        return tuple(totals)

    def _memory(
        self, pre: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
        """Return memory for h, for its gradient, and for the gradient of the pre-activations.

        For a whole step a kernel allocates h and its gradient, and both are kept.
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
        """Write ⟨dy, h·W₂ + b₂⟩ as ⟨dy·W₂ᵀ, h⟩ + ⟨dy, b₂⟩, which does not need the results."""
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
        """Add to a projection's gradients, or keep the factor that only this chunk has."""
        if self._factors is None:
            add_factors(self._sums, matrix, bias, x, y, part, weights_R1)
        elif matrix in self._sums or bias in self._sums:
            self._factors.keep(matrix, x if matrix == "w2" else y, part)
