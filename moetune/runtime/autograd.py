"""What layers need of autograd: its state, gradients of weights that wait, and hidden modes.

Zero-bubble schedules split the backward pass in two (Qi et al., 2023). Torch splits it by calling
autograd twice, and does not tell a function which gradients are asked for: exchanges of tokens
would run in both halves. Instead the layers leave their weights' products in `WeightGradients`, as
those of Megatron-Core (`delay_wgrad_compute`) and DeepSeek's DualPipe (`WeightGradStore`) do.

`torch.utils.checkpoint.create_selective_checkpoint_contexts` keeps single operations' results, and
hands these out in place of a repeated operation. A layer's operations write into buffers that
others fill again, and exchanges of a repeated pass are not those of the first, so that what was
kept would stand for something else. Its modes see the layer's step as an operator, or not at all.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils import _python_dispatch as dispatch
from torch.utils import checkpoint

# Nothing public of torch tells of a backward pass, names these modes, or leaves out one of several.
# ruff: noqa: SLF001
_SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


def is_in_backward() -> bool:
    """Return whether this thread is in a backward pass, as while a checkpoint computes again."""
    return torch._C._current_graph_task_id() != -1


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


def sees_selective_checkpoints() -> bool:
    """Return whether a mode of selective checkpointing sees the operations that follow."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    modes = dispatch._get_current_dispatch_mode_stack()
    return any(isinstance(mode, _SELECTIVE) for mode in modes)


@contextmanager
def unseen_by_selective_checkpoints() -> Iterator[None]:
    """Run without the modes of selective checkpointing; those of others stay."""
    if not torch._C._len_torch_dispatch_stack():
        yield
        return
    modes = _pop_all()
    _push([mode for mode in modes if not isinstance(mode, _SELECTIVE)])
    try:
        yield
    finally:
        _pop_all()
        _push(modes)


def _pop_all() -> list[dispatch.TorchDispatchMode]:
    return [dispatch._pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]


def _push(modes: list[dispatch.TorchDispatchMode]) -> None:
    """Push modes that were popped in this order."""
    for mode in reversed(modes):
        dispatch._push_mode(mode)
