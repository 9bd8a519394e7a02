"""The experts' work on one chunk in two halves: up to the last use of T_M, and after it.

Strategies that reuse memory load or free T_M, the rows before the second product, in between.
"""

from moetune.domain.costs import Estimate
from moetune.domain.gemm_forms import GemmForm
from moetune.domain.layer import Phase
from moetune.solve.layer.operations import LayerOperations
from moetune.solve.layer.totals import total


def two_halves(
    layer: LayerOperations, phase: Phase, *, rows: float, sorting: Estimate, recompute: bool
) -> tuple[Estimate, Estimate]:
    """Return both halves.

    Forward the GEMMs with W₁ (and W₃) and the activation come before, that with W₂ after.
    Backward the GEMMs with W₂ and the activation's gradient come before.

    Args:
        rows: or an array of them.
        sorting: of the rows by expert, and of the results back again.
        recompute: T_M is computed again, and that comes before.
    """
    parts = layer.parts(phase)

    def gemms(*forms: GemmForm, is_second: bool) -> list[Estimate]:
        count = 1 if is_second else layer.layer.num_gemms - 1
        return count * [
            layer.gemm(form, rows=rows, is_second=is_second, parts=parts) for form in forms
        ]

    activation = layer.activation(phase, rows)
    if phase == "forward":
        return (
            total(sorting, *gemms("forward", is_second=False), activation),
            total(*gemms("forward", is_second=True), sorting),
        )
    again = gemms("forward", is_second=False) if recompute else []
    gradients: tuple[GemmForm, GemmForm] = ("grad_input", "grad_weight")
    return (
        total(sorting, *again, *gemms(*gradients, is_second=True), activation),
        total(*gemms(*gradients, is_second=False), sorting),
    )
