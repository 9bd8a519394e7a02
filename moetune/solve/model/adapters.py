"""Times of frozen matrices and low-rank adapters: two thin products, a factor, and a sum."""

from collections.abc import Iterator
from typing import NamedTuple

from moetune.domain.architecture import Mixer
from moetune.domain.experts import DenseFfn, RoutedExperts
from moetune.domain.samples import GEMM_FORMS
from moetune.domain.targets import Target
from moetune.domain.training import FoldedLayout
from moetune.domain.tuning import NF4_BYTES, Matrix, Tuning, adapted_matrices
from moetune.solve.model.activations import ELEMENT
from moetune.solve.model.machine import DevicePrices
from moetune.solve.model.passes import ModuleName, Passes

_OUTPUTS, _OUTPUTS_BACK = 5, 2
"""Output tensors that are moved: to scale B·A·x and add it to W·x; to scale the gradient."""
_INPUTS_BACK = 3
"""Input tensors that are moved: two gradients, and their sum."""
_MERGED, _MERGED_BACK = 6, 5
"""Weight tensors that are moved: forward B·A is written, scaled, and added to the weights; backward
the gradient is scaled, and read for the gradients of A and B (PEFT,
`ParamWrapper.get_delta_weight`)."""


class AdapterPrices(NamedTuple):
    """Prices of a rank's frozen matrices, whose adapters move more data than they compute."""

    device: DevicePrices
    tuning: Tuning
    target: Target
    layout: FoldedLayout

    def of_part(
        self, module: ModuleName, part: Mixer | DenseFfn, tokens: float
    ) -> Iterator[tuple[ModuleName, Passes]]:
        """Yield the passes of a part's adapters and dequantized weights, and their collectives.

        With tensor ranks the output of a matrix cut along its inputs is gathered, and so is its
        gradient backward. The input gradient of the other matrices is scattered (Megatron-Bridge,
        `peft/utils.py`, `lin_out_gather_output`).
        """
        adapters, tp = self.tuning.adapter(part), self.layout.tp
        if self.tuning.base != "bfloat16":
            once = self._dequantized(part.parameters)
            yield module, Passes(forward=once, grad_input=once)
        if adapters is None:
            return
        for matrix in adapted_matrices(part, fuses=self.target.core is not None):
            yield module, self._of_matrix(matrix, adapters.rank, tokens, tp)
        span, whole = self.device.span(tp, 1), ELEMENT * tokens * part.d_model
        gather = self.device.collective("all_gather", span, whole / tp)
        scatter = self.device.collective("reduce_scatter", span, whole)
        yield "tensor_comm", Passes(forward=gather, grad_input=gather + scatter)

    def of_experts(self, part: RoutedExperts, rows: float, both: Passes) -> Passes:
        """Return the passes of experts with frozen weights and adapters.

        Merged adapters compute the gradient of the whole weight, and the passes of B·A. Gradients
        of shared adapters are all-reduced in each pass.

        Args:
            both: passes of the experts with gradients of the weights.
        """
        adapters, layout, moved = self.tuning.adapter(part), self.layout, self.device.memory_seconds
        experts, passes = part.num_experts // layout.ep, both.frozen
        weights = experts * part.expert_parameters / layout.etp
        if self.tuning.base != "bfloat16":
            passes += Passes(forward=self._dequantized(weights))  # the backward pass reuses them
        if adapters is None:
            return passes
        if self.target.merges_adapters:
            back = both.grad_weight + moved(_MERGED_BACK * ELEMENT * weights, kernels=3)
            merged = moved(_MERGED * ELEMENT * weights, kernels=3)
            return passes + Passes(forward=merged, grad_weight=back)
        is_shared, span = adapters.experts == "shared", self.device.span(layout.ep, 1)
        for matrix in adapted_matrices(part, fuses=True):
            num = 1 if is_shared else experts
            passes += self._of_matrix(matrix, adapters.rank, rows, 1, num_experts=num)
            for width in (matrix.d_in, matrix.d_out) if is_shared else ():
                size = ELEMENT * adapters.rank * width
                passes += Passes(grad_weight=self.device.collective("all_reduce", span, size))
        return passes

    def _dequantized(self, parameters: float) -> float:
        """Return the seconds to convert 4-bit weights to bfloat16, by the bytes moved."""
        return self.device.memory_seconds((NF4_BYTES + ELEMENT) * parameters, kernels=2)

    def _of_matrix(
        self, matrix: Matrix, rank: int, rows: float, cut: int, *, num_experts: int = 1
    ) -> Passes:
        """Return the passes of A and B over all experts' rows, without collectives."""
        d_out = max(1, matrix.d_out // (cut if matrix.is_cut else 1))
        both = self._thin(rows, matrix.d_in, rank, num_experts)
        both += self._thin(rows, rank, d_out, num_experts)
        inputs = ELEMENT * rows * _INPUTS_BACK * matrix.d_in
        outputs, moved = ELEMENT * rows * d_out, self.device.memory_seconds
        return both + Passes(
            forward=moved(_OUTPUTS * outputs, kernels=2),
            grad_input=moved(_OUTPUTS_BACK * outputs + inputs, kernels=2),
        )

    def _thin(self, rows: float, d_in: int, d_out: int, num_experts: int) -> Passes:
        """Return the passes of a product, each at least the time to move its tensors."""
        elements = rows * (d_in + d_out) + num_experts * d_in * d_out
        least, rows_each = self.device.memory_seconds(ELEMENT * elements), rows / num_experts
        times = (
            self.device.gemm(form, rows=rows_each, d_in=d_in, d_out=d_out, num_experts=num_experts)
            for form in GEMM_FORMS
        )
        return Passes(*(max(least, seconds) for seconds in times))
