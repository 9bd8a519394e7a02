"""Room for values that live for one chunk or one phase only."""

import math
from collections.abc import Sequence

import torch


class Scratch:
    """Buffers that are used again at every chunk and step.

    A CPU's allocator hands large blocks back to the system, and touching them anew costs more
    than the operation that fills them; on CUDA the caching allocator already keeps them.
    A name's buffer is valid until the name is asked for again.

    Args:
        poison: fill buffers with NaN before every use, to prove that nothing old is read.
    """

    def __init__(self, *, poison: bool = False) -> None:
        self.poison = poison
        self._kept: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def empty(self, name: str, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised tensor with the dtype and device of `like`."""
        if like.device.type != "cpu":
            return like.new_empty(tuple(shape))
        size = math.prod(shape)
        kept = self._kept.get((name, like.dtype))
        if kept is None or kept.numel() < size:
            kept = self._kept[name, like.dtype] = like.new_empty(size)
        return kept[:size].view(tuple(shape))
