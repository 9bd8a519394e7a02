"""Costs of experts in 8 bits beside their products: rounding of rows and matrices, and the wire.

A chunk's rows are rounded where they are multiplied, once for W₁ and W₃; matrices once a phase;
rows on the wire are packed before it and unpacked behind it. Factors of the gradients of matrices
are rounded within their products, as measured.

M d_model, H d_hidden, E_l experts of this rank.
"""

from moetune.domain.costs import Estimate
from moetune.domain.errors import ProfileError
from moetune.domain.layer import Phase
from moetune.domain.quantization import Format, Quantization, measured_dtype, packed_width
from moetune.solve.layer.costs import NOTHING, LayerCosts, total


def rounding(costs: LayerCosts, recipe: Quantization, phase: Phase, *, rows: float) -> Estimate:
    """Return the rounding of one chunk's rows: forward x and h, backward the gradients of both.

    Raises:
        ProfileError: it was not measured.
    """
    form = _form_of(recipe, phase)
    if form is None:
        return NOTHING
    layer = costs.layer
    # Backward the gradients of the results of W1 and W3 are two tensors.
    of_hidden = 1 if phase == "forward" else layer.num_gemms - 1
    return total(
        _measured(costs, recipe, "quantize", form, rows, layer.d_model),
        *(_measured(costs, recipe, "quantize", form, rows, layer.d_hidden),) * of_hidden,
    )


def packing(costs: LayerCosts, recipe: Quantization, *, rows: float) -> Estimate:
    """Return the packing and unpacking of one chunk's rows for the wire.

    Raises:
        ProfileError: it was not measured.
    """
    if recipe.dispatch is None or costs.world_size == 1:
        return NOTHING
    return _measured(costs, recipe, "quantize_wire", recipe.dispatch, rows, costs.layer.d_model)


def rounded_matrices(costs: LayerCosts, recipe: Quantization, phase: Phase) -> Estimate:
    """Return the rounding of this rank's matrices, once a phase.

    Raises:
        ProfileError: it was not measured.
    """
    form = _form_of(recipe, phase)
    if form is None:
        return NOTHING
    layer, local = costs.layer, costs.layer.num_experts // costs.world_size
    sizes = (layer.d_model, layer.d_hidden)
    sums_over, others = sizes if phase == "forward" else sizes[::-1]
    first = _measured(costs, recipe, "quantize_matrix", form, local * others, sums_over)
    second = _measured(costs, recipe, "quantize_matrix", form, local * sums_over, others)
    return total(*(first,) * (layer.num_gemms - 1), second)


def dispatched_bytes(costs: LayerCosts, recipe: Quantization) -> int | None:
    """Return the bytes of a row on its way to the experts; None in the dtype of the step."""
    form = recipe.dispatch
    return None if form is None else packed_width(costs.layer.d_model, form)


def _form_of(recipe: Quantization, phase: Phase) -> Format | None:
    return recipe.forward if phase == "forward" else recipe.grad_input


def _measured(
    costs: LayerCosts, recipe: Quantization, op: str, form: Format, rows: float, width: int
) -> Estimate:
    dtype = measured_dtype(form, emulate=recipe.emulate)
    found = costs.costs.rows_op(op=op, dtype=dtype, rows=rows, width=width)
    if found is None:
        raise ProfileError(
            f"the profile has no {op} in {dtype}, which experts quantized as {recipe} need",
            f"measure it: moetune profile --quantization {recipe} --dtype bfloat16, with the "
            "sizes of the layer",
        )
    return found
