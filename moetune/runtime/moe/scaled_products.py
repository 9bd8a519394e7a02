"""Products in 8 bits of the local experts, for one phase of a step.

`experts` calls this in place of `products.multiply` where a layer is quantized, and `weight_grads`
for the gradients of matrices. Rows are rounded where they are multiplied, matrices once a phase;
what is kept and sent back has the dtype of the step. A row is rounded alone and a column over all
of an expert's rows of the step, so that no number depends on the degree.

R rows, E local experts.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from moetune.domain.layer import Phase
from moetune.domain.quantization import Format, Quantization
from moetune.formats.grouped import Padding, multiply_groups, multiply_transposed, round_rows
from moetune.formats.scaled import Scaled, quantize
from moetune.runtime.moe.products import RowPart, multiply
from moetune.runtime.moe.workspace import MemoryTracker


class ScaledProducts:
    """Products of rows with matrices; those whose recipe names no format are as without one.

    Attributes:
        emulates: the step may have a dtype or device without grouped kernels.
    """

    def __init__(self, quantization: Quantization, phase: Phase, tracker: MemoryTracker) -> None:
        self._form = quantization.forward if phase == "forward" else quantization.grad_input
        self._grad_form = quantization.grad_weights
        self.emulates, self._tracker = quantization.emulate, tracker
        self._matrices: dict[tuple[int, tuple[int, ...]], Scaled] = {}
        self._paddings: dict[int, Padding] = {}
        self._last: tuple[torch.Tensor, int, Scaled] | None = None

    def multiply(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        part: RowPart,
        out: torch.Tensor | None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return every row times its expert's matrix, plus its bias: see `products.multiply`."""
        if self._form is None and self.emulates:  # of any dtype, on any device
            return multiply(x, w, replace(part, ends_E=None), out, bias)
        if self._form is None or part.ends_E is None or not len(x):
            return multiply(x, w, part, out, bias)
        padding = self._padding(part, part.ends_E, self._form)
        matrices = self._matrix(w, self._form)
        rows = self._rows(x, padding, self._form)
        result = multiply_groups(rows, matrices, padding, x.dtype, emulate=self.emulates)
        if bias is not None and part.experts_RE is not None:
            result.addmm_(part.experts_RE, bias)
        return result if out is None else out.copy_(result)

    def grad_weights(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        ends_E: torch.Tensor,
        rows_E: Sequence[int],
        dtype: torch.dtype,
    ) -> torch.Tensor | None:
        """Return xᵀ y of every expert's rows; None where the recipe names no format for it.

        Args:
            x, y: of all rows of the step, by expert.
            dtype: of the gradient; kernels round to the dtype of the step first.
        """
        if self._grad_form is None or not len(x):
            return None
        padding = Padding.of(ends_E, rows_E, self._grad_form)
        return multiply_transposed(x, y, padding, emulate=self.emulates).to(dtype)

    def _padding(self, part: RowPart, ends_E: torch.Tensor, form: Format) -> Padding:
        if part.piece not in self._paddings:
            rows_E = [high - low for _, low, high in part.blocks]
            self._paddings[part.piece] = Padding.of(ends_E, rows_E, form)
        return self._paddings[part.piece]

    def _rows(self, x: torch.Tensor, padding: Padding, form: Format) -> Scaled:
        """Return rows in 8 bits, made once for W₁ and W₃."""
        last, version = self._last, x._version  # noqa: SLF001 - changes when values do
        if last is None or last[0] is not x or last[1] != version:
            last = self._last = x, version, round_rows(x, padding, form)
        return last[2]

    def _matrix(self, w: torch.Tensor, form: Format) -> Scaled:
        """Return (E, out, in), made once: the caller keeps the matrices for the whole phase."""
        key = w.data_ptr(), w.stride()
        if key not in self._matrices:
            made = quantize(w.transpose(1, 2), form)
            self._tracker.add(made.values, made.scales)
            self._matrices[key] = made
        return self._matrices[key]
