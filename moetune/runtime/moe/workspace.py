"""The memory of a layer: a tracker of its tensors, and a workspace that all phases reuse.

Every tensor that a step makes is counted by the `MemoryTracker`, or cut from the `Workspace`.
"""

import contextlib
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from moetune.domain.errors import AllocationError
from moetune.domain.units import format_bytes

Shape = tuple[int, int]
_ALIGNMENT_BYTES = 64
_SIGNIFICANT_BITS, _MANY_ROWS = 4, 1024
_ADVICE = "fewer tokens a step, more chunks, or another strategy of memory reuse need less"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of live tensors that a layer made, and their peaks.

    On the device: reused buffers, saved activations, routing, outputs and gradients, even if only
    the caller still holds them. Not: parameters, the caller's tensors, temporaries within an
    operation. On the host: buffers for offloaded activations.
    """

    device_bytes: int
    peak_device_bytes: int
    host_bytes: int
    peak_host_bytes: int


class MemoryTracker:
    """Counts tensors from their allocation until their storage is freed, whoever holds it.

    Args:
        memory: "device" or "host", for errors.
    """

    def __init__(self, memory: str) -> None:
        self._memory = memory
        # A storage may end at any moment and in any thread: single operations on a dict only.
        self._live: dict[object, int] = {}
        self._peak_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes alive."""
        # No tuple: it is allocated after the iteration has begun, and a garbage collection then
        # may end storages.
        return sum(list(self._live.values()))

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once since the last reset."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        """Reset the peak to the bytes alive."""
        self._peak_bytes = self.num_bytes

    def add(self, *tensors: torch.Tensor) -> None:
        """Count new tensors, each with a storage of its own."""
        for tensor in tensors:
            storage, entry = tensor.untyped_storage(), object()
            self._live[entry] = storage.nbytes()
            weakref.finalize(storage, self._live.pop, entry).atexit = False
        self._peak_bytes = max(self._peak_bytes, sum(list(self._live.values())))

    def empty(
        self,
        what: str,
        shape: Sequence[int],
        like: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return an uninitialised tensor on the device of `like`, counted.

        On a GPU it has room for more rows, up to an eighth: rows follow the routing, and sizes
        that are new in each step would leave holes in the memory of torch's allocator.

        Args:
            what: purpose of the tensor, for the error.
            dtype: default, that of `like`.

        Raises:
            AllocationError: there is no memory for it.
        """
        dtype = like.dtype if dtype is None else dtype
        rows, *rest = shape
        room = rows if like.device.type == "cpu" or not rest else _few_sizes(rows)
        try:
            made = torch.empty((room, *rest), dtype=dtype, device=like.device)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            num_bytes = math.prod(shape) * dtype.itemsize
            raise self.short_of(f"{what}: {format_bytes(num_bytes)} ({num_bytes} bytes)") from error
        self.add(made)
        return made if room == rows else made[:rows]

    def __reduce__(self) -> tuple[type["MemoryTracker"], tuple[str]]:
        """Copies and pickles are empty: they hold no tensors."""
        return MemoryTracker, (self._memory,)

    @contextlib.contextmanager
    def explain(self, what: str) -> Iterator[None]:
        """Turn torch's out-of-memory errors of the body into one that names `what`.

        Raises:
            AllocationError: an operation found no memory.
        """
        try:
            yield
        except RuntimeError as error:
            self.check(error, what)
            raise

    def check(self, error: BaseException, what: str) -> None:
        """Raise AllocationError where torch's error is that `what` found no memory."""
        if isinstance(error, RuntimeError) and _is_out_of_memory(error):
            reason = str(error).splitlines()[0]
            raise self.short_of(f"{what} ({reason})") from error

    def short_of(self, what: str) -> AllocationError:
        """Return the error of an allocation that failed."""
        return AllocationError(
            f"no {self._memory} memory for {what}, besides the {format_bytes(self.num_bytes)} "
            "that this layer holds",
            _ADVICE,
        )


def _few_sizes(rows: int) -> int:
    """Return the next number with at most four significant bits; of few rows, the number."""
    if rows < _MANY_ROWS:  # as those of parameters, which do not change
        return rows
    step = 1 << max(0, rows.bit_length() - _SIGNIFICANT_BITS)
    return -(-rows // step) * step


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether torch could not allocate: only CUDA's error has a class of its own."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


class Workspace:
    """Memory for a phase's buffers, reused by every phase of every step.

    On a CPU it is one block, as large as the largest phase so far: the allocator returns large
    blocks to the system, and page faults of fresh ones cost up to three times the operation that
    fills them. On CUDA the caching allocator reuses them, and every buffer is its own tensor.

    Args:
        tracker: of the device.
        poison: fill buffers with NaN before every use, to find reads of old values.
    """

    def __init__(self, tracker: MemoryTracker, *, poison: bool = False) -> None:
        self.tracker = tracker
        self.poison = poison
        self._memory: torch.Tensor | None = None

    def __getstate__(self) -> dict[str, object]:
        """Omit the memory: a copy allocates its own."""
        return self.__dict__ | {"_memory": None}

    def buffers(self, shapes: Mapping[str, Shape], like: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a phase's uninitialised buffers by name; they overwrite the last phase's.

        All are made at once, so that a rank without memory fails before its first exchange.

        Raises:
            AllocationError: they do not fit.
        """
        if not shapes:
            return {}
        if like.device.type != "cpu":
            buffers = {
                name: self.tracker.empty(f"buffer {name!r}", shape, like)
                for name, shape in shapes.items()
            }
        else:
            buffers = self._cut(shapes, like)
        if self.poison:
            for buffer in buffers.values():
                buffer.fill_(torch.nan)
        return buffers

    @contextlib.contextmanager
    def guard(self, phase: str) -> Iterator[None]:
        """Run a phase. If it fails, drop the memory: exchanges under way may still write there.

        Raises:
            AllocationError: an operation of the phase found no memory.
        """
        try:
            yield
        except BaseException as error:
            self._memory = None
            self.tracker.check(error, phase)
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
            self._memory = self.tracker.empty(
                "the buffers of a phase", (num_bytes,), like, dtype=torch.uint8
            )
        return self._memory
