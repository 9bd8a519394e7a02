"""Gradients of weights that wait: a backward pass makes those of the inputs, a later one these.

Zero-bubble schedules split the backward pass in two (Qi et al., 2023). Torch splits it by calling
autograd twice, and does not tell a function which gradients are asked for: exchanges of tokens
would run in both halves. Instead the layers leave their weights' products here, as those of
Megatron-Core (`delay_wgrad_compute`) and DeepSeek's DualPipe (`WeightGradStore`) do.
"""

from collections import deque
from collections.abc import Callable

import torch

Start = Callable[[], Callable[[], None]]
"""Starts what a product waits for, and returns what multiplies and adds."""


class WeightGradients:
    """Products of weights that wait: those of the backward passes since the last `take`."""

    def __init__(self) -> None:
        self._waiting: deque[Start] = deque()

    def put(self, product: Callable[[], None]) -> None:
        """Let what multiplies and adds wait, with the tensors that it holds."""
        self._waiting.append(lambda: product)

    def put_gathered(self, start: Start) -> None:
        """Let a product wait whose factors are gathered first."""
        self._waiting.append(start)

    def take(self) -> Callable[[], None]:
        """Return what makes all that waits, in the order of the backward pass.

        All ranks of a tensor-parallel group call it together: some products gather their factors.
        """
        taken, self._waiting = self._waiting, deque()

        def run() -> None:
            finish: Callable[[], None] | None = None
            while taken:
                following = taken.popleft()()  # its factors travel beside the product before it
                if finish is not None:
                    finish()
                finish = following
            if finish is not None:
                finish()

        return run


@torch.no_grad()
def add_gradient(parameter: torch.Tensor, grad: torch.Tensor) -> None:
    """Add to a parameter's gradient, or set it, as autograd does."""
    if parameter.grad is None:
        parameter.grad = grad.to(parameter.dtype)
    else:
        parameter.grad += grad
