"""The optimizer of parameters in buffers, with its states in shards (ZeRO-1)."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import nn

from moetune.domain.errors import InputError
from moetune.runtime.parallel.parameter_buffer import ShardPiece

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes torch's optimizer of this rank's parameters, or of its parts of them."""
_MASTER_BYTES = 4
"""Parameters of fewer bytes are updated in copies of float32."""
_BY_ELEMENT = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


class Sharded(Protocol):
    """Parameters as the optimizer takes them."""

    @property
    def is_sharded(self) -> bool:
        """Whether each rank's optimizer has a part."""

    def pieces(self) -> Iterator[ShardPiece]:
        """Yield what this rank's optimizer updates."""

    def gather(self) -> None:
        """Start returning all ranks' parts of the parameters."""

    def wait(self) -> None:
        """Give the parameters the values of the last step, if they are still gathered."""


class BufferOptimizer:
    """An optimizer of buffers: torch's own, on this rank's parts.

    Parameters of two bytes are updated in copies of float32, which only this optimizer has.

    Attributes:
        inner: torch's optimizer, whose rates a scheduler may change.

    Raises:
        InputError: the optimizer of shards is none that works by element.
    """

    def __init__(self, buffers: Sequence[Sharded], make: MakeOptimizer) -> None:
        self._buffers = buffers
        self._pieces = [piece for buffer in buffers for piece in buffer.pieces()]
        self._parts = [_part(piece.values) for piece in self._pieces]
        self.inner = make(self._parts)
        if isinstance(self.inner, _BY_ELEMENT):
            return
        known, name = ", ".join(kind.__name__ for kind in _BY_ELEMENT), type(self.inner).__name__
        if any(buffer.is_sharded for buffer in buffers):
            raise InputError(
                f"{name} with a ZeRO stage, which cuts parameters anywhere",
                f"use one of {known}, or zero 0",
            )

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters; all ranks call this together.

        Shards are gathered until the next forward pass needs them.

        Raises:
            CollectiveError: a rank left.
        """
        for buffer in self._buffers:
            buffer.wait()
        for piece, part in zip(self._pieces, self._parts, strict=True):
            grad = piece.grad()
            part.grad = None if grad is None else grad.to(part.dtype)
        self.inner.step()
        for piece, part in zip(self._pieces, self._parts, strict=True):
            if part.dtype != piece.values.dtype:
                piece.values.copy_(part)
        for buffer in self._buffers:
            buffer.gather()


def _part(values: torch.Tensor) -> nn.Parameter:
    if values.element_size() < _MASTER_BYTES:
        return nn.Parameter(values.detach().float())
    return values if isinstance(values, nn.Parameter) else nn.Parameter(values)
