"""A few buffers that the chunks of one phase take in turn (MPipeMoE §III-D)."""

import torch

from moetune.runtime.scratch import Scratch


class Ring:
    """Buffers of one kind. A chunk's buffer is its own until a chunk takes the same slot.

    Args:
        name: in the scratch room; rings of one name share their buffers.
        slots: at most as many buffers as chunks.
        rows: of the largest chunk.
    """

    def __init__(
        self, scratch: Scratch, name: str, *, slots: int, rows: int, like: torch.Tensor, width: int
    ) -> None:
        self._buffers = [
            scratch.empty(f"{name} {slot}", (rows, width), like) for slot in range(slots)
        ]
        self._poison = scratch.poison

    def take(self, chunk: int, rows: int) -> torch.Tensor:
        """Return the chunk's buffer anew: (rows, width), whatever was in it."""
        buffer = self._buffers[chunk % len(self._buffers)]
        if self._poison:
            buffer.fill_(torch.nan)
        return buffer[:rows]

    def of(self, chunk: int, rows: int) -> torch.Tensor:
        """Return the buffer that the chunk took."""
        return self._buffers[chunk % len(self._buffers)][:rows]
