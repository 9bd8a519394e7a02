"""Compute on one chunk's rows: activation functions, and gradients of the combine weights.

`experts` calls this between the products. Results go to the caller's buffers, because fresh ones
cost page faults: up to three times the operation that fills them on a CPU. The backward of an
activation needs its input, the pre-activation; relu alone works in place, because its derivative
can be read from its result.

R rows, D model width, H hidden width, E local experts.
"""

from typing import cast

import torch

from moetune.domain.layer import Activation
from moetune.runtime.moe.pairs import dots
from moetune.runtime.moe.products import RowPart


def activate(
    pre: torch.Tensor, gate: torch.Tensor | None, activation: Activation, out: torch.Tensor
) -> torch.Tensor:
    """Return act(pre), for swiglu silu(pre) · gate, in `out`; relu works in place of `pre`."""
    if activation == "relu":
        return pre.relu_()
    if activation == "gelu":
        return cast("torch.Tensor", torch.ops.aten.gelu.out(pre, out=out))
    torch.ops.aten.silu.out(pre, out=out)
    return out if gate is None else out.mul_(gate)


def activate_again(
    saved: torch.Tensor, gate: torch.Tensor | None, activation: Activation, out: torch.Tensor
) -> torch.Tensor:
    """Return the result of `activate` again, from the saved pre-activation (for relu: result)."""
    return saved if activation == "relu" else activate(saved, gate, activation, out)


def activation_grad_(grad: torch.Tensor, pre: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return grad · act'(pre) in place of `grad`; for swiglu the activation is silu."""
    if activation == "relu":
        torch.ops.aten.threshold_backward.grad_input(grad, pre, 0, grad_input=grad)
    elif activation == "gelu":
        torch.ops.aten.gelu_backward.grad_input(grad, pre, grad_input=grad)
    else:
        torch.ops.aten.silu_backward.grad_input(grad, pre, grad_input=grad)
    return grad


class CombineWeights:
    """The combine weights of one chunk's rows where the experts apply them, and their gradients.

    The gradient of a weight is ⟨dy, o⟩. Policies that do not save the results o compute it at the
    expert, as ⟨dy·W₂ᵀ, h⟩ + ⟨dy, b₂⟩, which is equal.

    Args:
        weights_R1, grads_R1: (R, 1).
        b2: (E, D), None without biases.
    """

    def __init__(
        self, weights_R1: torch.Tensor, grads_R1: torch.Tensor, b2: torch.Tensor | None
    ) -> None:
        self._weights_R1, self._grads_R1, self._b2 = weights_R1, grads_R1, b2

    def apply(
        self,
        grad: torch.Tensor,
        hidden: torch.Tensor,
        grad_hidden: torch.Tensor,
        part: RowPart,
    ) -> None:
        """Write the weights' gradients, then weight both gradients in place.

        Args:
            grad: (R, D), dy of every row.
            grad_hidden: (R, H), dy·W₂ᵀ.
        """
        dots(grad_hidden.unsqueeze(1), hidden, self._grads_R1)
        if self._b2 is not None:
            self._add_bias(grad, self._b2, part)
        grad.mul_(self._weights_R1)
        grad_hidden.mul_(self._weights_R1)

    def _add_bias(self, grad: torch.Tensor, b2: torch.Tensor, part: RowPart) -> None:
        if part.experts_RE is not None:
            dots_RE = (grad @ b2.T).mul_(part.experts_RE)
            self._grads_R1 += dots_RE.sum(dim=1, keepdim=True)
            return
        for expert, low, high in part.blocks:
            self._grads_R1[low:high] += grad[low:high] @ b2[expert].unsqueeze(1)
