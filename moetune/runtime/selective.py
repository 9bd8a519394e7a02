"""Selective checkpointing: a layer of experts is recomputed as a whole, or not at all.

`torch.utils.checkpoint.create_selective_checkpoint_contexts` keeps single operations' results, and
hands these out in place of a repeated operation. Here operations write into buffers that others
fill again, and exchanges of a repeated pass are not those of the first, so that what was kept would
stand for something else. Its modes do not see the layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import _python_dispatch as dispatch
from torch.utils import checkpoint

# Nothing public of torch names these modes, or leaves out one of several that are active.
# ruff: noqa: SLF001
_SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)


class HiddenModes:
    """The modes that do not see a layer.

    Args:
        modes: all that are active outside of the layer, popped in this order.
    """

    def __init__(self, modes: list[dispatch.TorchDispatchMode]) -> None:
        self._modes = modes

    @contextmanager
    def seeing(self) -> Iterator[None]:
        """Run what the modes see, within what they do not."""
        if not self._modes:
            yield
            return
        others = _pop_all()
        _push(self._modes)
        try:
            yield
        finally:
            _pop_all()
            _push(others)


@contextmanager
def unseen_by_selective_checkpoints() -> Iterator[HiddenModes]:
    """Run without the modes of selective checkpointing; those of others stay."""
    if not torch._C._len_torch_dispatch_stack():
        yield HiddenModes([])
        return
    modes = _pop_all()
    others = [mode for mode in modes if not isinstance(mode, _SELECTIVE)]
    _push(others)
    try:
        yield HiddenModes(modes)
    finally:
        _pop_all()
        _push(modes)


def _pop_all() -> list[dispatch.TorchDispatchMode]:
    return [dispatch._pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]


def _push(modes: list[dispatch.TorchDispatchMode]) -> None:
    """Push modes that were popped in this order."""
    for mode in reversed(modes):
        dispatch._push_mode(mode)
