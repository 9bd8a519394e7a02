"""A step's input: what is wrong with it, its dtype at the experts, and its shape for the results.

Compilers trace these functions.
"""

from operator import index

import torch

from moetune.domain.layer import LayerShape
from moetune.runtime.moe.expert_module import LocalExperts
from moetune.runtime.moe.placement import is_dtensor


def gradients_of(x: torch.Tensor) -> str:
    """Return which gradients a step of the input has, which is equal on all ranks."""
    return f"gradients {torch.is_grad_enabled()}, of the input {x.requires_grad}"


def shaped_as(x: torch.Tensor, y_TD: torch.Tensor) -> torch.Tensor:
    """Return a step's outputs as those of the input `x`."""
    # Not a view: an in-place operation on one would drop the hooks that FSDP2 sets on it.
    y: torch.Tensor = torch.ops.aten._unsafe_view(y_TD.to(x.dtype), x.shape)  # noqa: SLF001
    return y


def sizes_of(values: torch.Tensor) -> tuple[int, ...]:
    """Return the shape for a text, which is a constant of a compiled graph."""
    return tuple(map(index, values.shape))


def problem_of(
    x: torch.Tensor, dtype: torch.dtype, shape: LayerShape, experts: LocalExperts
) -> str:
    """Return why the experts cannot take a step's tokens; "" if they can.

    Args:
        dtype: that the step computes in.
    """
    if not x.dim() or x.shape[-1] != shape.d_model:
        return f"x has shape {sizes_of(x)}, its last size must be {shape.d_model}"
    weight = experts.up
    # FSDP2 moves what it gathers from the host.
    if x.device.type != weight.device.type and not is_dtensor(weight):
        return f"x is on {x.device}, the experts are on {weight.device}"
    is_cast = experts.compute_dtype or torch.is_autocast_enabled(x.device.type)
    if dtype != weight.dtype and not is_cast:
        return f"x is {x.dtype}, the experts are {weight.dtype}"
    return ""


def dtype_of_step(x: torch.Tensor) -> torch.dtype:
    """Return the dtype that experts compute a step's tokens in, that of autocast where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
