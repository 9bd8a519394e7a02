"""Room for values that live for one chunk or one phase only."""

import contextlib
import math
from collections.abc import Iterator, Mapping

import torch

from moetune.runtime.account import Account

Shape = tuple[int, int]
_ALIGNMENT_BYTES = 64


class Scratch:
    """One piece of memory that every phase of every step cuts into its rooms anew.

    It is as large as the largest phase so far. A CPU's allocator hands large blocks back to the
    system, and touching them anew costs more than the operation that fills them; on CUDA the
    caching allocator already keeps them, and every room is a tensor of its own.

    Args:
        account: of the device.
        poison: fill rooms with NaN before every use, to prove that nothing old is read.
    """

    def __init__(self, account: Account, *, poison: bool = False) -> None:
        self.account = account
        self.poison = poison
        self._memory: torch.Tensor | None = None

    def __getstate__(self) -> dict[str, object]:
        """Leave the memory behind: a copy has made none."""
        return self.__dict__ | {"_memory": None}

    def rooms(self, shapes: Mapping[str, Shape], like: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a phase's uninitialised rooms by name; those of the phase before are over.

        All of them at once, so that a rank without memory fails before it exchanges anything.

        Raises:
            AllocationError: they do not fit.
        """
        if like.device.type != "cpu":
            rooms = {
                name: self.account.empty(f"buffer {name!r}", shape, like)
                for name, shape in shapes.items()
            }
        else:
            rooms = self._cut(shapes, like)
        if self.poison:
            for room in rooms.values():
                room.fill_(torch.nan)
        return rooms

    @contextlib.contextmanager
    def guard(self, phase: str) -> Iterator[None]:
        """Run a phase; if it fails, exchanges under way keep its rooms to themselves.

        Raises:
            AllocationError: an operation of the phase found no memory.
        """
        try:
            with self.account.explain(phase):
                yield
        except BaseException:
            self._memory = None
            raise

    def _cut(self, shapes: Mapping[str, Shape], like: torch.Tensor) -> dict[str, torch.Tensor]:
        sizes = [math.prod(shape) * like.element_size() for shape in shapes.values()]
        padded = [-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes]
        memory = self._at_least(sum(padded), like)
        parts = zip(shapes.items(), sizes, memory[: sum(padded)].split(padded), strict=True)
        return {
            name: part[:size].view(like.dtype).view(shape) for (name, shape), size, part in parts
        }

    def _at_least(self, num_bytes: int, like: torch.Tensor) -> torch.Tensor:
        if self._memory is None or self._memory.numel() < num_bytes:
            self._memory = None
            self._memory = self.account.empty(
                "the buffers of a phase", (num_bytes,), like, dtype=torch.uint8
            )
        return self._memory
