"""The device to measure on, CPU or CUDA behind one protocol: clock, streams and buffers."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from moetune.domain.cluster import DeviceKind

_FLUSHED_L2_SIZES = 2


class Device(Protocol):
    """Where operations run. A thread that uses it calls `use` first."""

    @property
    def kind(self) -> DeviceKind:
        """CPU or CUDA."""
        ...

    @property
    def torch_device(self) -> torch.device:
        """Its name in torch."""
        ...

    def use(self) -> AbstractContextManager[object]:
        """Return a context in which this thread issues work on a stream of its own."""
        ...

    def seconds(self, run: Callable[[], None]) -> float:
        """Return the time that the work issued by `run` takes, to its very end."""
        ...

    def synchronize(self) -> None:
        """Wait for what this thread issued."""
        ...

    def mark(self) -> Callable[[], float]:
        """Mark what this thread has issued so far.

        Returns:
            A function that waits for it and returns when it was done, on `perf_counter`.
        """
        ...

    def flush(self) -> None:
        """Drop what the last block left in the device's cache, before a timed block."""
        ...

    def host_bytes(self, num_bytes: int, *, pinned: bool) -> torch.Tensor:
        """Return an uninitialised buffer in host memory."""
        ...

    def usable_bytes(self) -> int | None:
        """Return the memory that tensors can have now, freed ones included; None if not known."""
        ...

    def clock_hertz(self) -> float | None:
        """Return the current clock of the processors, None where it cannot be read."""
        ...


class CpuDevice:
    """Host cores: operations are done when they return."""

    kind: DeviceKind = "cpu"
    torch_device = torch.device("cpu")

    def use(self) -> AbstractContextManager[object]:
        """Return an empty context: there are no streams."""
        return nullcontext()

    def seconds(self, run: Callable[[], None]) -> float:
        """Return the time of `run`."""
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def synchronize(self) -> None:
        """Return at once."""

    def mark(self) -> Callable[[], float]:
        """Return the time now: operations are done when they return."""
        now = time.perf_counter()
        return lambda: now

    def flush(self) -> None:
        """Keep the caches: a chunk's rows come from the core that just received them."""

    def host_bytes(self, num_bytes: int, *, pinned: bool) -> torch.Tensor:  # noqa: ARG002
        """Return a buffer; host memory is not pinned for a CPU."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def usable_bytes(self) -> int | None:
        """Return None: host memory is shared with everything else."""
        return None

    def clock_hertz(self) -> float | None:
        """Return None: the clock that a virtual machine reports is not the real one."""
        return None


class CudaDevice:
    """One CUDA device, timed by events on the calling thread's stream."""

    kind: DeviceKind = "cuda"

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(index)
        l2_bytes = int(getattr(properties, "L2_cache_size", 0)) or 2**26
        self._flushed = torch.empty(
            _FLUSHED_L2_SIZES * l2_bytes, dtype=torch.uint8, device=self.torch_device
        )

    def use(self) -> AbstractContextManager[object]:
        """Return the context of a new stream; threads start on device 0 otherwise."""
        torch.cuda.set_device(self.torch_device)
        return torch.cuda.stream(torch.cuda.Stream(self.torch_device))

    def seconds(self, run: Callable[[], None]) -> float:
        """Return the time between two events around `run`."""
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def synchronize(self) -> None:
        """Wait for this thread's stream."""
        torch.cuda.current_stream(self.torch_device).synchronize()

    def mark(self) -> Callable[[], float]:
        """Record an event; it is done no later than when the host has seen it."""
        event = torch.cuda.Event()
        event.record()

        def done() -> float:
            event.synchronize()
            return time.perf_counter()

        return done

    def flush(self) -> None:
        """Overwrite twice the size of the L2 cache, ahead of the timed block in its stream."""
        self._flushed.zero_()

    def host_bytes(self, num_bytes: int, *, pinned: bool) -> torch.Tensor:
        """Return a buffer, pinned or pageable."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)

    def usable_bytes(self) -> int | None:
        """Return what is free, and what torch's allocator holds already."""
        free_bytes, _ = torch.cuda.mem_get_info(self.torch_device)
        return free_bytes + torch.cuda.memory_reserved(self.torch_device)

    def clock_hertz(self) -> float | None:
        """Return the SM clock, None where the driver's library for it is missing."""
        try:
            return float(torch.cuda.clock_rate(self.torch_device)) * 1e6
        except Exception:  # noqa: BLE001 - the driver's library has errors of its own
            return None


def open_device(local_rank: int = 0) -> Device:
    """Return this rank's device: CUDA where torch can use it."""
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        return CudaDevice(local_rank)
    return CpuDevice()


def drop(_: object) -> None:
    """Discard a result: only its time matters."""


def torch_dtype(dtype: str) -> torch.dtype:
    """Return torch's dtype of that name."""
    found = getattr(torch, dtype)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch.{dtype} is no dtype")
    return found


def tensor_maker(device: Device, dtype: str) -> Callable[..., torch.Tensor]:
    """Return a function from a shape to a filled tensor: denormal garbage would be slow."""
    kind = torch_dtype(dtype)
    return lambda *shape: torch.rand(shape, dtype=kind, device=device.torch_device).sub_(0.5)
