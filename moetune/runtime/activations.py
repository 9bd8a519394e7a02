"""The experts' activation functions, and their backward from what the forward pass kept.

Kept is the pre-activation; for relu its result, which serves as well, in place.
"""

from collections.abc import Mapping
from typing import cast

import torch

from moetune.domain.layer import Activation
from moetune.runtime.scratch import Shape


def activate(
    pre: torch.Tensor, gate: torch.Tensor | None, activation: Activation, out: torch.Tensor
) -> torch.Tensor:
    """Return act(pre), for swiglu silu(pre) · gate, in `out`; relu happens in `pre` itself."""
    if activation == "relu":
        return pre.relu_()
    if activation == "gelu":
        return cast("torch.Tensor", torch.ops.aten.gelu.out(pre, out=out))
    torch.ops.aten.silu.out(pre, out=out)
    return out if gate is None else out.mul_(gate)


def hidden_shapes(
    activation: Activation, num_rows: int, d_hidden: int, *, backward: bool
) -> dict[str, Shape]:
    """Return the rooms that a phase needs besides the pre-activations of its largest chunk."""
    names = () if activation == "relu" else ("hidden",)
    return dict.fromkeys((*names, "grad hidden") if backward else names, (num_rows, d_hidden))


def hidden_room(
    pre: torch.Tensor, activation: Activation, rooms: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return where act(pre) goes: relu works in place and needs no room."""
    return pre if activation == "relu" else rooms["hidden"][: len(pre)]


def reactivate(
    kept: torch.Tensor, gate: torch.Tensor | None, activation: Activation, out: torch.Tensor
) -> torch.Tensor:
    """Return what `activate` returned, from what the forward pass kept."""
    return kept if activation == "relu" else activate(kept, gate, activation, out)


def activation_grad_(grad: torch.Tensor, pre: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return grad · act'(pre) in place of `grad`; for swiglu the activation is silu."""
    if activation == "relu":
        torch.ops.aten.threshold_backward.grad_input(grad, pre, 0, grad_input=grad)
    elif activation == "gelu":
        torch.ops.aten.gelu_backward.grad_input(grad, pre, grad_input=grad)
    else:
        torch.ops.aten.silu_backward.grad_input(grad, pre, grad_input=grad)
    return grad
