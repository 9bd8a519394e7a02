"""What layers need of autograd: its state, and hidden modes.

`torch.utils.checkpoint.create_selective_checkpoint_contexts` keeps single operations' results, and
hands these out in place of a repeated operation. A layer's operations write into buffers that
others fill again, and exchanges of a repeated pass are not those of the first, so that what was
kept would stand for something else. Its modes see the layer's step as an operator, or not at all.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import _python_dispatch as dispatch
from torch.utils import checkpoint

# Nothing public of torch tells of a backward pass, names these modes, or leaves out some of them.
# ruff: noqa: SLF001
_SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


def is_in_backward() -> bool:
    """Return whether this thread is in a backward pass, as while a checkpoint computes again."""
    return torch._C._current_graph_task_id() != -1


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
