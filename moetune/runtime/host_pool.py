"""Host memory for activations that leave the device until the backward pass."""

import warnings
from collections.abc import Sequence

import torch

from moetune.domain.errors import MoetuneError


class HostPool:
    """Host buffers that steps borrow and give back: pinned ones where there is a GPU.

    Buffers are kept and grow to the largest step, so that a steady state allocates nothing.

    Attributes:
        is_pageable: whether pinned memory was wanted and could not be had.
        num_bytes: of all buffers, lent or not.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self.is_pageable = False
        self.num_bytes = 0

    def borrow(self, shapes: Sequence[tuple[int, int]], like: torch.Tensor) -> "Loan":
        """Return room for tensors of these shapes with the dtype of `like`."""
        size = sum(rows * width for rows, width in shapes) * like.element_size()
        buffer = self._best(size) if size else None
        if buffer is None:
            buffer = self._allocate(size, pinned=like.is_cuda)
        return Loan(self, buffer, shapes, like.dtype)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take a buffer back."""
        self._free.append(buffer)

    def _best(self, size: int) -> torch.Tensor | None:
        """Take the smallest free buffer that is large enough, and drop one that is not."""
        fitting = [one for one in self._free if one.numel() >= size]
        if fitting:
            best = min(fitting, key=torch.Tensor.numel)
            self._free = [one for one in self._free if one is not best]
            return best
        if self._free:
            self.num_bytes -= self._free.pop().numel()
        return None

    def _allocate(self, size: int, *, pinned: bool) -> torch.Tensor:
        self.num_bytes += size
        if pinned and not self.is_pageable:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self.is_pageable = True
                warnings.warn(
                    f"no pinned memory for {size} bytes ({str(error).splitlines()[0]}): "
                    "activations are offloaded to pageable memory, which is slower",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return torch.empty(size, dtype=torch.uint8)


class Loan:
    """Borrowed host tensors, for one forward and one backward pass."""

    def __init__(
        self,
        pool: HostPool,
        buffer: torch.Tensor,
        shapes: Sequence[tuple[int, int]],
        dtype: torch.dtype,
    ) -> None:
        self._pool = pool
        self._buffer: torch.Tensor | None = buffer
        values, low = buffer[: buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype), 0
        self._tensors: list[torch.Tensor] = []
        for rows, width in shapes:
            self._tensors.append(values[low : low + rows * width].view(rows, width))
            low += rows * width

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors, in the order of the shapes.

        Raises:
            MoetuneError: they were given back: a second backward pass wants them.
        """
        if self._buffer is None:
            raise MoetuneError(
                "a second backward pass through a layer whose activations were in host memory",
                "use memory_reuse='S4' or 'none' where the graph is retained",
            )
        return self._tensors

    def end(self) -> None:
        """Give the buffer back."""
        if self._buffer is not None:
            self._pool.give_back(self._buffer)
            self._buffer, self._tensors = None, []
