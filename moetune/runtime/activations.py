"""The experts' activation functions, with the backward from the kept pre-activation."""

from typing import cast

import torch
from torch.nn import functional

from moetune.domain.layer import Activation


def activate(pre: torch.Tensor, gate: torch.Tensor | None, activation: Activation) -> torch.Tensor:
    """Return act(pre), or silu(pre) · gate for swiglu."""
    if activation == "relu":
        return torch.relu(pre)
    if activation == "gelu":
        return functional.gelu(pre)
    hidden = functional.silu(pre)
    return hidden if gate is None else hidden.mul_(gate)


def activation_grad(grad: torch.Tensor, pre: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return grad · act'(pre); for swiglu the activation is silu."""
    if activation == "relu":
        result = torch.ops.aten.threshold_backward(grad, pre, 0)
    elif activation == "gelu":
        result = torch.ops.aten.gelu_backward(grad, pre)
    else:
        result = torch.ops.aten.silu_backward(grad, pre)
    return cast("torch.Tensor", result)
