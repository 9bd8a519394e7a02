"""The memory of a layer: errors that name what lacks memory, and a workspace for all phases."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from moetune.domain.errors import AllocationError
from moetune.domain.units import format_bytes

Shape = tuple[int, int]
_ALIGNMENT_BYTES = 64
_SIGNIFICANT_BITS, _MANY_ROWS = 4, 1024
_ADVICE = "fewer tokens a step, more chunks, or another strategy of memory reuse need less"


def empty(
    what: str,
    shape: Sequence[int],
    like: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    memory: str = "device",
) -> torch.Tensor:
    """Return an uninitialised tensor on the device of `like`.

    On a GPU it has room for up to an eighth more rows. The number of rows follows the routing, and
    a new size in each step would fragment the memory of torch's allocator.

    Args:
        what: purpose of the tensor, for the error.
        dtype: the default is the dtype of `like`.
        memory: "device" or "host", for the error.

    Raises:
        AllocationError: there is no memory for the tensor.
    """
    dtype = like.dtype if dtype is None else dtype
    rows, *rest = shape
    room = rows if like.device.type == "cpu" or not rest else _few_sizes(rows)
    try:
        made = allocated((room, *rest), dtype, like.device)
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        num_bytes = math.prod(shape) * dtype.itemsize
        needed = f"{what}: {format_bytes(num_bytes)} ({num_bytes} bytes)"
        raise short_of(needed, memory) from error
    return made if room == rows else made[:rows]


def allocated(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, pinned: bool = False
) -> torch.Tensor:
    """Return an uninitialised tensor; all memory of a step's buffers is allocated here."""
    return torch.empty(shape, dtype=dtype, device=device, pin_memory=pinned)


@contextlib.contextmanager
def explain(what: str) -> Iterator[None]:
    """Turn torch's out-of-memory errors in the body into an error that names `what`.

    Raises:
        AllocationError: there was no memory for an operation.
    """
    try:
        yield
    except RuntimeError as error:
        check_memory(error, what)
        raise


def check_memory(error: BaseException, what: str) -> None:
    """Raise AllocationError for `what` if torch's error is an out-of-memory error."""
    if isinstance(error, RuntimeError) and _is_out_of_memory(error):
        raise short_of(f"{what} ({str(error).splitlines()[0]})") from error


def short_of(what: str, memory: str = "device") -> AllocationError:
    """Return the error for an allocation that failed."""
    return AllocationError(f"no {memory} memory for {what}", _ADVICE)


def _few_sizes(rows: int) -> int:
    """Return the next number with at most four significant bits; a small number stays."""
    if rows < _MANY_ROWS:  # as those of parameters, which do not change
        return rows
    step = 1 << max(0, rows.bit_length() - _SIGNIFICANT_BITS)
    return -(-rows // step) * step


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether torch could not allocate; only CUDA's error has a class."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


class Workspace:
    """Memory for a phase's buffers, reused by every phase of every step.

    On a CPU it is a single block, as large as the largest phase so far. The allocator returns large
    blocks to the system, and page faults of fresh blocks cost up to three times the operation that
    fills them. On CUDA every buffer is a tensor, because the caching allocator reuses memory.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the memory: a copy allocates new memory."""
        return self.__dict__ | {"_memory": None}

    def buffers(self, shapes: Mapping[str, Shape], like: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a phase's uninitialised buffers by name; they overwrite the last phase's buffers.

        All are allocated at once, so that a rank without memory fails before its first exchange.

        Raises:
            AllocationError: they do not fit.
        """
        if shapes and like.device.type == "cpu":
            return self._cut(shapes, like)
        return {name: empty(f"buffer {name!r}", shape, like) for name, shape in shapes.items()}

    @contextlib.contextmanager
    def guard(self, phase: str) -> Iterator[None]:
        """Run a phase. If it fails, drop the memory, as exchanges under way may still write there.

        Raises:
            AllocationError: there was no memory for an operation of the phase.
        """
        try:
            yield
        except BaseException as error:
            self._memory = None
            check_memory(error, phase)
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
            self._memory = empty("the buffers of a phase", (num_bytes,), like, dtype=torch.uint8)
        return self._memory
