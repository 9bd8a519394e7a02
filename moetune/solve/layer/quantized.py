"""Costs of experts in 8 bits beside their products: rounding of rows and matrices, and the wire.

A chunk's rows are rounded where they are multiplied, once for W₁ and W₃; matrices once a phase;
rows on the wire are packed before it and unpacked behind it. Gradients of matrices are one product
each of all rows of the step, behind the last chunk, whose factors are rounded within it.

M d_model, H d_hidden, E_l experts of this rank.
"""

from collections.abc import Iterator

from moetune.domain.costs import Estimate
from moetune.domain.errors import ProfileError
from moetune.domain.layer import Phase
from moetune.domain.quantization import Format, Quantization, measured_dtype, packed_width
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.operations import PHASE_GEMMS


def quantized_chunk(
    costs: LayerCosts, recipe: Quantization, phase: Phase, *, rows: float
) -> Iterator[Estimate]:
    """Yield the rounding and packing of a chunk's rows, and its products.

    Raises:
        ProfileError: one was not measured.
    """
    layer, form = costs.layer, _form_of(recipe, phase)
    if form is not None:
        # Backward the gradients of the results of W1 and W3 are two tensors.
        of_hidden = 1 if phase == "forward" else layer.num_gemms - 1
        yield _measured(costs, recipe, "quantize", form, rows, layer.d_model)
        yield from (_measured(costs, recipe, "quantize", form, rows, layer.d_hidden),) * of_hidden
    if recipe.dispatch is not None and costs.world_size > 1:
        yield _measured(costs, recipe, "quantize_wire", recipe.dispatch, rows, layer.d_model)
    for product in PHASE_GEMMS[phase]:
        if product != "grad_weight" or not recipe.multiplies:
            yield from costs.products(product, rows, parts=costs.parts(phase))


def once_a_phase(
    costs: LayerCosts, recipe: Quantization, phase: Phase, *, rows: float
) -> Iterator[Estimate]:
    """Yield what is done once for all of a phase's rows: matrices rounded, and their gradients.

    Raises:
        ProfileError: one was not measured.
    """
    layer, local = costs.layer, costs.layer.num_experts // costs.world_size
    form = _form_of(recipe, phase)
    if form is not None:
        sizes = (layer.d_model, layer.d_hidden)
        sums_over, others = sizes if phase == "forward" else sizes[::-1]
        first = _measured(costs, recipe, "quantize_matrix", form, local * others, sums_over)
        yield from (first,) * (layer.num_gemms - 1)
        yield _measured(costs, recipe, "quantize_matrix", form, local * sums_over, others)
    if phase == "backward" and recipe.multiplies:
        yield from costs.products("grad_weight", rows)


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
