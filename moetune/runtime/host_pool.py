"""Host memory for activations that leave the device until the backward pass."""

import warnings
import weakref
from collections.abc import Sequence

import torch

from moetune.domain.errors import MoetuneError
from moetune.runtime.account import Account


class HostPool:
    """Host buffers that steps borrow and give back: pinned ones where there is a GPU.

    Buffers are kept and grow to the largest step, so that a steady state allocates nothing.

    Attributes:
        is_pageable: whether pinned memory was wanted and could not be had.
    """

    def __init__(self, account: Account) -> None:
        self._account = account
        self._free: list[torch.Tensor] = []
        self.is_pageable = False

    def __getstate__(self) -> dict[str, object]:
        """Leave the buffers behind: a copy has made none."""
        return self.__dict__ | {"_free": []}

    def borrow(self, shapes: Sequence[tuple[int, int]], like: torch.Tensor) -> "Loan":
        """Return room for tensors of these shapes with the dtype of `like`.

        Raises:
            AllocationError: there is no host memory for them.
        """
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
            self._free.pop()
        return None

    def _allocate(self, size: int, *, pinned: bool) -> torch.Tensor:
        if pinned and not self.is_pageable:
            try:
                buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self.is_pageable = True
                warnings.warn(
                    f"no pinned memory for {size} bytes ({str(error).splitlines()[0]}): "
                    "activations are offloaded to pageable memory, which is slower",
                    RuntimeWarning,
                    stacklevel=2,
                )
            else:
                self._account.add(buffer)
                return buffer
        on_host = torch.empty(0, dtype=torch.uint8, device="cpu")
        return self._account.empty("activations that leave the device", (size,), on_host)


class Loan:
    """Borrowed host tensors, for one forward and one backward pass.

    The buffer goes back at the end of the loan, or when nobody has the loan any more: the
    backward pass may never come.
    """

    def __init__(
        self,
        pool: HostPool,
        buffer: torch.Tensor,
        shapes: Sequence[tuple[int, int]],
        dtype: torch.dtype,
    ) -> None:
        self._give_back = weakref.finalize(self, pool.give_back, buffer)
        self._give_back.atexit = False
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
        if not self._give_back.alive:
            raise MoetuneError(
                "a second backward pass through a layer whose activations were in host memory",
                "use memory_reuse='S4' or 'none' where the graph is retained",
            )
        return self._tensors

    def end(self) -> None:
        """Give the buffer back."""
        self._tensors = []
        self._give_back()
