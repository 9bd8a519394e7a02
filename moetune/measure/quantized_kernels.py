"""Products of experts in 8 bits, and the rounding around them, as a quantized layer runs them.

Rows are rounded once for several products and matrices once a phase, so that both are points of
their own. Factors of the gradients of matrices are rounded for one product, and within its point.
"""

from collections.abc import Callable

import torch

from moetune.domain.errors import InputError
from moetune.domain.quantization import Format, Quantization, measured_format
from moetune.domain.samples import GemmPoint, RowsPoint
from moetune.formats.grouped import (
    Padding,
    multiply_groups,
    multiply_transposed,
    refusal,
    round_rows,
)
from moetune.formats.scaled import pack, quantize, unpack
from moetune.measure.device import Device, drop, tensor_maker


def quantized_gemm(
    point: GemmPoint, form: Format, device: Device, *, emulate: bool
) -> Callable[[], None]:
    """Return a function that runs the GEMM once, on rounded factors; results are in bfloat16.

    Raises:
        InputError: the device has no kernel for the format.
    """
    _check_device(form, device, emulate=emulate)
    make = tensor_maker(device, "bfloat16")
    total_rows = point.rows * point.num_experts
    x, y = make(total_rows, point.d_in), make(total_rows, point.d_out)
    w = make(point.num_experts, point.d_in, point.d_out)
    ends = torch.arange(1, point.num_experts + 1, dtype=torch.int32, device=device.torch_device)
    padding = Padding.of(ends.mul_(point.rows), [point.rows] * point.num_experts, form)
    if point.product == "grad_weight":
        return lambda: drop(multiply_transposed(x, y, padding, emulate=emulate))
    if point.product == "forward":
        rows, matrices = x, quantize(w.transpose(1, 2), form)
    else:
        rows, matrices = y, quantize(w, form)

    rounded = round_rows(rows, padding, form)
    return lambda: drop(
        multiply_groups(rounded, matrices, padding, torch.bfloat16, emulate=emulate)
    )


def quantized_rows(point: RowsPoint, device: Device) -> Callable[[], None] | None:
    """Return a function that rounds rows, a matrix or the rows of the wire; None of other points.

    "quantize" has rows that are padded, "quantize_matrix" a matrix whose columns lie together,
    "quantize_wire" both ends of an exchange: rows packed, and unpacked.

    Raises:
        InputError: the device has no kernel for the format.
    """
    known = measured_format(point.dtype)
    if known is None:
        return None
    form, emulate = known
    _check_device(form, device, emulate=emulate)
    make = tensor_maker(device, "bfloat16")
    if point.op == "quantize_matrix":
        matrix = make(point.width, point.rows).T
        return lambda: drop(quantize(matrix, form))
    x = make(point.rows, point.width)
    if point.op == "quantize":
        ends = torch.tensor([point.rows], dtype=torch.int32, device=device.torch_device)
        padding = Padding.of(ends, [point.rows], form)
        return lambda: drop(round_rows(x, padding, form))
    return lambda: drop(
        x.copy_(unpack(pack(quantize(x, form)), point.width, form).dequantize(x.dtype))
    )


def _check_device(form: Format, device: Device, *, emulate: bool) -> None:
    recipe = Quantization(forward=form, emulate=emulate)
    problem = refusal(recipe, device.torch_device, torch.bfloat16)
    if problem:
        raise InputError(
            problem,
            f"measure without --quantization here, or to try plans --quantization {form}+emulate",
        )
