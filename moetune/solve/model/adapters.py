"""Times of low-rank adapters: two thin products for each matrix, a factor, and a sum."""

from typing import NamedTuple

from moetune.domain.samples import GemmForm
from moetune.domain.tuning import Matrix
from moetune.solve.model.activations import ELEMENT
from moetune.solve.model.machine import DevicePrices
from moetune.solve.model.passes import Passes

_FORMS: tuple[GemmForm, ...] = ("forward", "grad_input", "grad_weight")
_OUTPUTS, _OUTPUTS_BACK = 5, 2
"""Tensors of a matrix's results: B·A·x times its factor, added to W·x; the gradient times it."""
_INPUTS_BACK = 3
"""Tensors of a matrix's input: its two gradients, and their sum."""
_MERGED, _MERGED_BACK = 6, 5
"""Tensors of weights: B·A written, multiplied, and added to the weights; its gradient multiplied,
and read for those of A and B (PEFT, `ParamWrapper.get_delta_weight`)."""


class AdapterPrices(NamedTuple):
    """Prices of adapters of a rank on a device, whose products move more than they multiply."""

    device: DevicePrices
    rank: int

    def of_matrix(self, matrix: Matrix, rows: float, cut: int, *, num_experts: int = 1) -> Passes:
        """Return the passes of A and B, without collectives.

        Args:
            rows: of all experts together.
            cut: tensor ranks that share the matrix.
        """
        share = cut if matrix.is_cut else 1
        d_out = max(1, matrix.d_out // share)
        both = self._thin(rows, matrix.d_in, self.rank, num_experts)
        both += self._thin(rows, self.rank, d_out, num_experts)
        moved = self.device.memory_seconds
        return both + Passes(
            forward=moved(_OUTPUTS * ELEMENT * rows * d_out, kernels=2),
            grad_input=moved(
                ELEMENT * rows * (_OUTPUTS_BACK * d_out + _INPUTS_BACK * matrix.d_in), kernels=2
            ),
        )

    def merged(self, weights: float) -> Passes:
        """Return the passes of adapters that are added to so many weights."""
        moved = self.device.memory_seconds
        return Passes(
            forward=moved(_MERGED * ELEMENT * weights, kernels=3),
            grad_weight=moved(_MERGED_BACK * ELEMENT * weights, kernels=3),
        )

    def _thin(self, rows: float, d_in: int, d_out: int, num_experts: int) -> Passes:
        """Return the passes of a product, no shorter than its tensors take to move."""
        elements = rows * (d_in + d_out) + num_experts * d_in * d_out
        least = self.device.memory_seconds(ELEMENT * elements)
        times = (
            self.device.gemm(
                form, rows=rows / num_experts, d_in=d_in, d_out=d_out, num_experts=num_experts
            )
            for form in _FORMS
        )
        return Passes(*(max(least, seconds) for seconds in times))
