"""A few buffers that the chunks of one phase take in turn (MPipeMoE §III-D)."""

from collections.abc import Callable, Sequence

import torch


class Ring:
    """Buffers of one kind. A chunk's buffer is its own until a chunk takes the same slot.

    Args:
        buffers: (rows of the largest chunk, width) each.
        poison: fill a buffer with NaN when it is taken.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], *, poison: bool) -> None:
        self._buffers, self._poison = buffers, poison

    @property
    def num_slots(self) -> int:
        """Number of buffers."""
        return len(self._buffers)

    def take(self, chunk: int, rows: int) -> torch.Tensor:
        """Return the chunk's buffer anew: (rows, width), whatever was in it."""
        buffer = self._buffers[chunk % len(self._buffers)]
        if self._poison:
            buffer.fill_(torch.nan)
        return buffer[:rows]

    def of(self, chunk: int, rows: int) -> torch.Tensor:
        """Return the buffer that the chunk took."""
        return self._buffers[chunk % len(self._buffers)][:rows]


class Rotation:
    """A ring that one use after another takes; each waits for the one it takes over from."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._num_uses = 0
        self._endings: dict[int, Callable[[], None]] = {}

    def take(self, rows: int) -> torch.Tensor:
        """Return the next buffer, once its last use has ended."""
        self.finish(self._num_uses - self._ring.num_slots)
        buffer = self._ring.take(self._num_uses, rows)
        self._num_uses += 1
        return buffer

    def until(self, ending: Callable[[], None]) -> int:
        """Say what waits for the end of the use that began last; return its number."""
        self._endings[self._num_uses - 1] = ending
        return self._num_uses - 1

    def finish(self, use: int) -> None:
        """Wait for the end of a use, if it has not ended yet."""
        ending = self._endings.pop(use, None)
        if ending is not None:
            ending()

    def end(self) -> None:
        """End every use, in the order of their beginnings."""
        for use in sorted(self._endings):
            self.finish(use)
