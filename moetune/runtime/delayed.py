"""Gradients of weights that wait: a backward pass makes those of the inputs, a later one these.

Zero-bubble schedules split the backward pass in two (Qi et al., 2023). Torch splits it by calling
autograd twice, and does not tell a function which gradients are asked for: exchanges of tokens
would run in both halves. Instead the layers leave their weights' products here, as those of
Megatron-Core (`delay_wgrad_compute`) and DeepSeek's DualPipe (`WeightGradStore`) do.
"""

from collections.abc import Callable

import torch


class WeightGradients:
    """Products of weights that wait: those of the backward passes since the last `take`."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def put(self, product: Callable[[], None]) -> None:
        """Let what multiplies and adds wait, with the tensors that it holds."""
        self._waiting.append(product)

    def take(self) -> Callable[[], None]:
        """Return what makes all that waits, in the order of the backward pass."""
        taken, self._waiting = self._waiting, []

        def run() -> None:
            while taken:
                taken.pop(0)()

        return run


def add_gradient(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    """Add to a parameter's gradient, or to that of the DTensor that it is this rank's part of."""
    parameter.backward(grad.to(parameter.dtype))
