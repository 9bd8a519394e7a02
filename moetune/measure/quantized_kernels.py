"""GEMMs of experts in 8 bits, as a quantized layer runs them: rows rounded, padded and multiplied.

Matrices are rounded before: a layer does it once a phase, not for each chunk.
"""

from collections.abc import Callable

import torch

from moetune.domain.errors import InputError
from moetune.domain.quantization import Format, Quantization
from moetune.domain.samples import GemmPoint
from moetune.formats.grouped import (
    Padding,
    multiply_groups,
    multiply_transposed,
    refusal,
    round_rows,
)
from moetune.formats.scaled import quantize
from moetune.measure.device import Device, drop, tensor_maker


def quantized_gemm(point: GemmPoint, form: Format, device: Device) -> Callable[[], None]:
    """Return a function that runs the GEMM once, on rows and results in bfloat16.

    Raises:
        InputError: the device has no kernel for the format.
    """
    problem = refusal(Quantization(forward=form), device.torch_device, torch.bfloat16)
    if problem:
        raise InputError(problem, "measure without --quantization here")
    make = tensor_maker(device, "bfloat16")
    total_rows = point.rows * point.num_experts
    x, y = make(total_rows, point.d_in), make(total_rows, point.d_out)
    w = make(point.num_experts, point.d_in, point.d_out)
    ends = torch.arange(1, point.num_experts + 1, dtype=torch.int32, device=device.torch_device)
    padding = Padding.of(ends.mul_(point.rows), [point.rows] * point.num_experts, form)
    if point.product == "grad_weight":
        return lambda: drop(multiply_transposed(x, y, padding))
    if point.product == "forward":
        rows, matrices = x, quantize(w.transpose(1, 2), form)
    else:
        rows, matrices = y, quantize(w, form)

    def run() -> None:
        multiply_groups(round_rows(rows, padding, form), matrices, padding, rows.dtype)

    return run
