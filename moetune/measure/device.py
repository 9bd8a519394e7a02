"""The device to measure on, CPU or CUDA, with the same interface: clock, streams and buffers."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from moetune.domain.cluster import DeviceKind
from moetune.runtime.trace import stamp_now

# This is above every GPU's clock: a sleep of that many cycles is never too short.
_CYCLES_PER_SECOND = 2.5e9
# A longer sleep fills the queue of launches, and the host waits.
_LONGEST_HEAD_START_SECONDS = 0.02
_CLOCK_SHARE = 0.9
THROTTLED = "throttled"
"""The mark of a sample that was measured at a low clock."""


class Device:
    """The device where operations run; here the host's cores, on which a call returns when done.

    `CudaDevice` is a GPU. A thread that uses a device calls `use` first.

    Attributes:
        cache_bytes: size of a cache that must be cold, as in a layer; 0 for no such cache: a CPU's
            operations use different operands in turn.
    """

    kind: DeviceKind = "cpu"
    torch_device = torch.device("cpu")
    cache_bytes = 0

    def use(self) -> AbstractContextManager[object]:
        """Return a context in which this thread issues work on a stream of no other thread."""
        return nullcontext()

    def seconds(
        self,
        run: Callable[[], None],
        *,
        lead_in: Callable[[], None] | None = None,
        head_start_seconds: float = 0.0,
    ) -> float:
        """Return the time of the work that `run` issues, up to its end.

        Args:
            lead_in: on a GPU, issues work that runs before the clock starts.
            head_start_seconds: time that the host needs to issue all work; a GPU, which otherwise
                runs it meanwhile, begins that much later.
        """
        self.prepare(lead_in, head_start_seconds)
        start = stamp_now(self.torch_device)
        run()
        return stamp_now(self.torch_device).since(start)

    def prepare(self, lead_in: Callable[[], None] | None, head_start_seconds: float) -> None:
        """Prepare a timed block; a CPU needs nothing, as its ranks have just left the barrier."""

    def synchronize(self) -> None:
        """Wait for the work that this thread has issued."""

    def mark(self) -> Callable[[], float]:
        """Mark the end of the work that this thread has issued so far.

        Returns:
            A function that waits for that work and returns its end time on `perf_counter`.
        """
        now = time.perf_counter()
        return lambda: now

    def host_bytes(self, num_bytes: int, *, pinned: bool) -> torch.Tensor:  # noqa: ARG002 - for a GPU alone
        """Return an uninitialised buffer in host memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def usable_bytes(self) -> int | None:
        """Return the memory that tensors can have now, including freed tensors'; None on a CPU."""
        return None

    def clock_hertz(self) -> float | None:
        """Return the current clock; None if it cannot be read, as a virtual machine's is wrong."""
        return None


class CudaDevice(Device):
    """A CUDA device, timed by events on the calling thread's stream.

    Threads reuse the streams of earlier threads. torch's allocator has a separate pool for each
    stream, and with a new stream per point the last point's freed memory would stay reserved.
    """

    kind: DeviceKind = "cuda"

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        properties = torch.cuda.get_device_properties(index)
        self.cache_bytes = int(getattr(properties, "L2_cache_size", 0)) or 2**26
        self._idle_streams: list[torch.cuda.Stream] = []
        self._lock = threading.Lock()
        self._thread = threading.local()

    @contextmanager
    def use(self) -> Iterator[object]:
        """Take a stream on this device for the thread, which otherwise starts on device 0."""
        torch.cuda.set_device(self.torch_device)
        with self._lock:
            idle = self._idle_streams
            stream = idle.pop() if idle else torch.cuda.Stream(self.torch_device)
        try:
            with torch.cuda.stream(stream):
                # A new zero for each point, because events count in float32.
                zero = stamp_now(self.torch_device)
                stream.synchronize()
                self._thread.zero = zero, time.perf_counter()
                yield stream
        finally:
            with self._lock:
                self._idle_streams.append(stream)

    def prepare(self, lead_in: Callable[[], None] | None, head_start_seconds: float) -> None:
        """Make the stream sleep while the host issues all work, and run the lead-in.

        Otherwise the time of kernels that are shorter than their launch would be the launch's.
        """
        if head_start_seconds:
            asleep_seconds = min(head_start_seconds, _LONGEST_HEAD_START_SECONDS)
            torch.cuda._sleep(int(asleep_seconds * _CYCLES_PER_SECOND))  # noqa: SLF001 - torch's, for tests of streams
        if lead_in is not None:
            lead_in()

    def synchronize(self) -> None:
        """Wait for this thread's stream."""
        torch.cuda.current_stream(self.torch_device).synchronize()

    def mark(self) -> Callable[[], float]:
        """Record an event; its time is the device's, even if the host asks for it late."""
        stamp, (zero, host_seconds) = stamp_now(self.torch_device), self._thread.zero
        return lambda: host_seconds + stamp.since(zero)

    def host_bytes(self, num_bytes: int, *, pinned: bool) -> torch.Tensor:
        """Return a buffer, pinned or pageable."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)

    def usable_bytes(self) -> int | None:
        """Return the free memory plus the memory that torch's allocator has reserved."""
        free_bytes, _ = torch.cuda.mem_get_info(self.torch_device)
        return free_bytes + torch.cuda.memory_reserved(self.torch_device)

    def clock_hertz(self) -> float | None:
        """Return the SM clock; None without nvidia-ml-py, which the fingerprint then shows."""
        try:
            return float(torch.cuda.clock_rate(self.torch_device)) * 1e6
        except Exception:  # noqa: BLE001 - the driver's library has errors of many classes
            return None


class Clock:
    """A watch on a device's clock, which falls if the device is too hot or takes too much power."""

    def __init__(self, device: Device) -> None:
        self._device, self._best_hertz = device, 0.0

    def is_low(self) -> bool:
        """Return whether the clock is below nine tenths of the highest clock that was seen."""
        hertz = self._device.clock_hertz()
        if hertz is None:
            return False
        self._best_hertz = max(self._best_hertz, hertz)
        return hertz < _CLOCK_SHARE * self._best_hertz


def open_device(local_rank: int = 0) -> Device:
    """Return this rank's device, which is CUDA if torch can use it."""
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        return CudaDevice(local_rank)
    return Device()


def drop(_: object) -> None:
    """Discard a result, because only its time matters."""


def torch_dtype(dtype: str) -> torch.dtype:
    """Return torch's dtype of that name."""
    value = getattr(torch, dtype)
    if not isinstance(value, torch.dtype):
        raise TypeError(f"torch.{dtype} is no dtype")
    return value


def tensor_maker(device: Device, dtype: str) -> Callable[..., torch.Tensor]:
    """Return a function that makes a filled tensor of a shape: denormal garbage would be slow."""
    kind = torch_dtype(dtype)
    return lambda *shape: torch.rand(shape, dtype=kind, device=device.torch_device).sub_(0.5)
