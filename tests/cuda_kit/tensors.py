"""Tensors in host memory that say they are on a GPU, and a record of every operation on them.

Operations are computed at once, on the CPU: values are right whatever the order, and only the
ledger knows what a GPU might have done instead. Every ATen operation comes by, also those of
autograd and of `out=` arguments, with the bytes that it reads and writes by its schema.
"""

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cuda_kit.lanes import Buffer, Lane, Ledger, Region
from tests.cuda_kit.streams import Streams

EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
"""Operations that allocate and touch nothing."""
BLOCKING = frozenset({"_local_scalar_dense", "equal", "nonzero", "masked_select", "bincount"})
"""Operations on a GPU whose result the host waits for."""
COPIES = frozenset({"copy_", "_to_copy"})
BY_ROW = frozenset({"index_add_", "index_copy_", "index_select"})
"""Operations that touch only those rows of their first argument which the third one names."""
HOST = torch.device("cpu")
_TO_LIST = torch.Tensor.tolist  # before it is patched


@dataclass(frozen=True, slots=True)
class Target:
    """Where new tensors of the current call go."""

    device: torch.device
    is_pinned: bool = False


class Tensors:
    """The devices of all tensors, and the record of operations on them.

    Args:
        host: returns the lane of this thread.
        cost: simulated seconds of an operation, by its name.
    """

    def __init__(
        self, ledger: Ledger, host: Callable[[], Lane], cost: Callable[[str], float]
    ) -> None:
        self.ledger, self._host, self._cost = ledger, host, cost
        self.streams: Streams
        self.syncs: list[str] = []
        self.used: set[torch.device] = set()
        self._buffers: dict[int, Buffer] = {}
        self._freed: deque[int] = deque()
        self._num_buffers = 0
        self._target = threading.local()
        self._lock = threading.RLock()

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All memory that lives."""
        self.collect()
        return tuple(self._buffers.values())

    # Devices

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """Return where a tensor claims to be."""
        kept = self._buffers.get(tensor.untyped_storage()._cdata)
        return kept.device if kept is not None else _real_device(tensor)

    def buffer_of(self, tensor: torch.Tensor) -> Buffer:
        """Return the memory of a tensor."""
        storage = tensor.untyped_storage()
        buffer = self._buffers.get(storage._cdata)
        if buffer is None:
            self._num_buffers += 1
            key, num_bytes = storage._cdata, storage.nbytes()
            name = f"buffer {self._num_buffers} of {num_bytes} bytes"
            buffer = self._buffers[key] = Buffer(name, num_bytes, HOST, None)
            weakref.finalize(storage, self._freed.append, key).atexit = False
        return buffer

    def put(self, tensor: torch.Tensor, target: Target) -> Buffer:
        """Say where a new tensor is."""
        buffer = self.buffer_of(tensor)
        buffer.device, buffer.is_pinned = target.device, target.is_pinned
        if target.device.type == "cuda":
            self.used.add(target.device)
            buffer.home = self.streams.lane(target.device)
            buffer.name = buffer.name.partition(" on ")[0] + f" on {target.device}"
            self.ledger.allocate(buffer.home, self._host())
        return buffer

    def region(self, tensor: torch.Tensor) -> Region:
        """Return the bytes that a tensor spans."""
        width = tensor.element_size()
        low = int(tensor.storage_offset()) * width
        if not tensor.numel():
            return self.buffer_of(tensor), low, low
        last = 0
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            last += (int(size) - 1) * int(stride)
        return self.buffer_of(tensor), low, low + (last + 1) * width

    def collect(self) -> None:
        """Note the storages that have ended since."""
        while self._freed:
            buffer = self._buffers.pop(self._freed.popleft(), None)
            if buffer is not None:
                self.ledger.free(buffer, self._host())

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Note that a storage was emptied, or filled again, in place."""
        buffer = self._buffers.get(storage._cdata)
        if buffer is None or buffer.device == HOST:
            return
        self.collect()
        self.ledger.free(buffer, self._host())
        if num_bytes:
            buffer.home = self.streams.lane(buffer.device)
            self.ledger.allocate(buffer.home, self._host())

    @contextmanager
    def placing(self, target: Target | None) -> Iterator[None]:
        """Put what the body makes there."""
        before = getattr(self._target, "value", None)
        self._target.value = target
        try:
            yield
        finally:
            self._target.value = before

    # Operations

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record one operation after it was computed."""
        with self._lock:
            self.collect()
            name = _touching(func)
            if name is None:
                return
            inputs, writes = _arguments(func, args, kwargs)
            made = [tensor for tensor in _tensors(result) if not _is_among(tensor, writes)]
            if any(tensor.is_meta for tensor in (*inputs, *writes, *made)):
                return
            target: Target | None = getattr(self._target, "value", None)
            device = self._device(name, [*inputs, *writes], target)
            reads = [] if name in EMPTY or name.endswith("_like") else inputs
            for tensor in made:
                self.put(tensor, target or Target(device))
            if name in COPIES and (len({self.device_of(t) for t in [*reads, *writes, *made]}) > 1):
                source, into = (reads or writes)[-1], (writes or made)[0]
                self._copy(source, into, non_blocking=_non_blocking(func, args, kwargs))
                return
            if name in BY_ROW and args[1] == 0:
                reads, writes = (_only_rows(some, args[0], args[2]) for some in (reads, writes))
            if name not in EMPTY:
                self._run(name, device, reads, [*writes, *made])

    def constant(self, tensor: torch.Tensor, target: Target) -> None:
        """Record a tensor made of Python's numbers, which the host copies to a device."""
        with self._lock:
            self.collect()
            buffer = self.put(tensor, target)
            if buffer.device != HOST:
                self._run("a constant", buffer.device, [], [tensor])
                self._block("a constant", buffer.device)

    def read_by_host(self, tensor: torch.Tensor, name: str) -> None:
        """Record that the host reads a tensor's values, and waits for them."""
        with self._lock:
            self.collect()
            device = self.device_of(tensor)
            self._run(name, device, [tensor], [])
            if device != HOST:
                self._block(name, device)

    def _run(
        self,
        name: str,
        device: torch.device,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        host = self._host()
        lane = host if device == HOST else self.streams.lane(device)
        self.ledger.run(
            lane, host, name, reads=map(self.region, reads), writes=map(self.region, writes),
            seconds=0.0 if lane is host else self._cost(name),
        )  # fmt: skip
        if lane is not host and name in BLOCKING:
            self._block(name, device)

    def _copy(self, source: torch.Tensor, into: torch.Tensor, *, non_blocking: bool) -> None:
        """Record a copy between host and device: asynchronous from or to pinned memory alone."""
        host_side, device_side = source, into
        if self.device_of(source) != HOST:
            host_side, device_side = into, source
        lane, host = self.streams.lane(self.device_of(device_side)), self._host()
        is_async = non_blocking and self.buffer_of(host_side).is_pinned
        reads, writes = [self.region(source)], [self.region(into)]
        if not is_async and host_side is source:  # staged by the driver before the call returns
            self.ledger.run(host, host, "a copy's staging", reads=reads)
            reads = []
        self.ledger.run(
            lane, host, "copy_", reads=reads, writes=writes, seconds=self._cost("copy_")
        )
        if not is_async and (host_side is into or not non_blocking):
            self._block("a copy", lane.device)

    def _block(self, name: str, device: torch.device) -> None:
        self.syncs.append(name)
        self._host().follow(self.streams.lane(device).point())

    def _device(
        self, name: str, tensors: Sequence[torch.Tensor], target: Target | None
    ) -> torch.device:
        """Return where an operation runs.

        Raises:
            RuntimeError: its tensors are on several devices, as torch.
        """
        kinds = {self.device_of(tensor): tensor for tensor in tensors}
        gpus = [device for device in kinds if device != HOST]
        on_host = [tensor for tensor in tensors if self.device_of(tensor) == HOST]
        may_mix = name in COPIES or name.startswith("index")
        if len(gpus) > 1 or (gpus and not may_mix and any(tensor.dim() for tensor in on_host)):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{' and '.join(map(str, kinds))}! ({name})"
            )
        if gpus:
            return gpus[0]
        return target.device if target is not None and not tensors else HOST


class Record(TorchDispatchMode):
    """Sends every operation of a thread to `Tensors.note`."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's mode has no types
        self._tensors = tensors

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._tensors.note(func, args, kwargs or {}, result)
        return result


def _real_device(tensor: torch.Tensor) -> torch.device:
    device = torch._C.TensorBase.device.__get__(tensor)
    assert isinstance(device, torch.device)
    return device


@functools.cache
def _touching(func: Any) -> str | None:
    """Return an ATen operation's name; None where it touches no memory."""
    schema = func._schema
    library, _, name = schema.name.partition("::")
    return None if library != "aten" or _is_view(schema) else str(name)


def _is_view(schema: Any) -> bool:
    """Return whether an operation only looks at memory in another way, or asks for a size."""
    writes = any(arg.alias_info is not None and arg.alias_info.is_write for arg in schema.arguments)
    returns = [value.alias_info for value in schema.returns]
    is_alias = bool(returns) and all(alias is not None and not alias.is_write for alias in returns)
    return (is_alias and not writes) or "sym_" in schema.name


def _arguments(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an operation is given, and those that it changes."""
    inputs: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for place, (name, is_written) in enumerate(_parameters(func)):
        value = args[place] if place < len(args) else kwargs.get(name)
        (writes if is_written else inputs).extend(_tensors(value))
    return inputs, writes


@functools.cache
def _parameters(func: Any) -> tuple[tuple[str, bool], ...]:
    """Return the names of an operation's arguments, and whether it writes to them."""
    return tuple(
        (arg.name, arg.alias_info is not None and arg.alias_info.is_write)
        for arg in func._schema.arguments
    )


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return (value,)
    if value is None or isinstance(value, (int, float, str)):
        return ()
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _is_among(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    storage = tensor.untyped_storage()._cdata
    return any(tensor.untyped_storage()._cdata == storage for tensor in others)


def _only_rows(
    tensors: Sequence[torch.Tensor], whole: torch.Tensor, index: torch.Tensor
) -> list[torch.Tensor]:
    """Return the tensors with `whole` replaced by some of its rows."""
    rows = [whole[row] for row in sorted(set(_TO_LIST(index.flatten())))]
    return [part for tensor in tensors for part in (rows if tensor is whole else [tensor])]


def _non_blocking(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "non_blocking":
            return bool(args[place] if place < len(args) else kwargs.get("non_blocking", False))
    return False
