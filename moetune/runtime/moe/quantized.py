"""Checks of a quantized layer: of its arguments when it is made, and of each step's device.

`expert_layer` and `planned_layer` call these; `scaled_products` and `packed` run what passes.
"""

import torch

from moetune.domain.constraints import Strategy
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.domain.quantization import Quantization
from moetune.formats.grouped import refusal

_ADVICE = (
    "use a bfloat16 step on such a GPU, no quantization, or to test numerics a "
    "moetune.Quantization with emulate=True"
)


def checked_quantization(
    wanted: Quantization | str | None, layer: LayerShape, strategy: Strategy | None
) -> Quantization | None:
    """Return a layer's recipe, None where nothing is quantized.

    Args:
        strategy: that the layer's arguments set; None where they set none.

    Raises:
        InputError: there is no such format, it does not fit the widths, or memory is reused.
    """
    quantization = Quantization.of(wanted)
    if quantization is not None:
        quantization.check_widths(d_model=layer.d_model, d_hidden=layer.d_hidden)
        check_keeps(strategy)
    return quantization


def check_keeps(strategy: Strategy | None) -> None:
    """Raise InputError for a strategy that sums gradients of weights chunk by chunk."""
    if strategy not in {None, "none"}:
        raise InputError(
            f"strategy {strategy} is not available with quantized experts, whose gradients of "
            "weights are one product of all chunks",
            "omit memory_reuse, or quantization",
        )


def problem_of(quantization: Quantization | None, device: torch.device, dtype: torch.dtype) -> str:
    """Return why a step cannot run, and what to do; "" if it can."""
    problem = "" if quantization is None else refusal(quantization, device, dtype)
    return f"{problem}: {_ADVICE}" if problem else ""
