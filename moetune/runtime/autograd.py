"""Autograd's state, and a way to hide a layer's operations from selective checkpointing.

`torch.utils.checkpoint.create_selective_checkpoint_contexts` saves the results of single operations
and returns them when the operations are repeated. A layer's operations write into reused buffers,
and a repeated pass exchanges anew, so a saved result would be wrong. The modes of selective
checkpointing therefore see a layer's step as a single operator, or not at all.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import _python_dispatch as dispatch
from torch.utils import checkpoint

# torch has no public way to detect a backward pass, to name these modes, or to omit some of them.
# ruff: noqa: SLF001
_SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


def is_in_backward() -> bool:
    """Return whether this thread is in a backward pass, for example recomputing a checkpoint."""
    return torch._C._current_graph_task_id() != -1


def sees_selective_checkpoints() -> bool:
    """Return whether a mode of selective checkpointing sees the operations that follow."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    modes = dispatch._get_current_dispatch_mode_stack()
    return any(isinstance(mode, _SELECTIVE) for mode in modes)


@contextmanager
def unseen_by_selective_checkpoints() -> Iterator[None]:
    """Run the body without the modes of selective checkpointing; other modes stay."""
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
    """Push modes back, which are given in the order in which they were popped."""
    for mode in reversed(modes):
        dispatch._push_mode(mode)
