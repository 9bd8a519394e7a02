"""`FakeCuda`: a process that sees GPUs, on a machine that has none."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from types import MappingProxyType, SimpleNamespace
from typing import Any, Self

import pytest
import torch

from tests.cuda_kit.lanes import Lane, Ledger, Operation, Point
from tests.cuda_kit.patches import patch
from tests.cuda_kit.products import wider_products
from tests.cuda_kit.streams import Stream, Streams
from tests.cuda_kit.tensors import HOST, Record, Tensors

COSTS: Mapping[str, float] = MappingProxyType({"copy_": 2e-3, "_to_copy": 2e-3})
"""Simulated seconds of operations that do not take one millisecond."""


CYCLES_PER_SECOND = 2e9
"""Of a simulated GPU's clock."""


class CudaFaultError(AssertionError):
    """What a GPU might have done wrong, one line for each fault."""


class FakeCuda:
    """Within this context `torch.cuda` has devices, and every operation is recorded.

    Tensors made on a "cuda" device, or moved there, say that they are there. Their values are
    computed on the CPU at once. The exit raises CudaFaultError with all that went wrong in time:
    operations on the same bytes without an order, memory handed out again while another stream
    uses it, host memory read before a copy has ended, and streams or events of a device that has
    no tensor.

    Not imitated: autograd's own choice of stream and device in a backward pass, which here runs
    in the current ones; sub-streams of an operation; peer copies between GPUs, which are refused.

    Args:
        num_devices: that this process sees.
        memory_bytes: of each.
        free_bytes: what `torch.cuda.mem_get_info` says is free.
        cost: simulated seconds of an operation, by the name of its ATen operation.
    """

    def __init__(
        self,
        num_devices: int = 2,
        *,
        memory_bytes: int = 2**34,
        free_bytes: int = 2**34,
        cost: Callable[[str], float] = lambda name: COSTS.get(name, 1e-3),
    ) -> None:
        self.ledger = Ledger()
        self.cost = cost
        self.tensors = Tensors(self.ledger, lambda: self.host, cost)
        self.streams = self.tensors.streams = Streams(self, num_devices)
        self._memory = free_bytes, memory_bytes
        self._hosts: dict[int, Lane] = {}
        self._stack = ExitStack()

    @property
    def faults(self) -> list[str]:
        """What went wrong so far."""
        self.tensors.collect()
        return self.ledger.faults

    @property
    def operations(self) -> list[Operation]:
        """Everything that ran, in the order of issue."""
        return self.ledger.operations

    @property
    def syncs(self) -> list[str]:
        """Operations for which the host waited without calling a stream or an event."""
        return self.tensors.syncs

    @property
    def host(self) -> Lane:
        """The lane of this thread."""
        number = threading.get_ident()
        if number not in self._hosts:
            name = "the host" if not self._hosts else f"thread {len(self._hosts)} of the host"
            self._hosts[number] = Lane(name, HOST)
        return self._hosts[number]

    def is_used(self, device: torch.device) -> bool:
        """Return whether a tensor was ever on the device."""
        return device in self.tensors.used

    def current_stream(self, device: torch.device | int | str | None = None) -> Stream:
        """Return a device's current stream, as `torch.cuda.current_stream`."""
        return self.streams.current(device)

    def __enter__(self) -> Self:
        _ = self.host  # the first lane is this thread's
        monkeypatch = self._stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in self._functions().items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (0, 0, 0))
        patch(monkeypatch, self.tensors, self.streams)
        monkeypatch.setattr(ThreadPoolExecutor, "submit", self._submit(ThreadPoolExecutor.submit))
        self._stack.enter_context(wider_products())
        self._stack.enter_context(Record(self.tensors))
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.tensors.collect()
        self._stack.close()
        self.ledger.close(self.host)
        if error is None and self.ledger.faults:
            raise CudaFaultError("\n".join(self.ledger.faults))

    def _functions(self) -> dict[str, Any]:
        streams, (free, total) = self.streams, self._memory
        return {
            "is_available": lambda: True,
            "device_count": lambda: streams.num_devices,
            "current_device": lambda: streams.resolve(None).index,
            "set_device": streams.set_device,
            "device": streams.on,
            "Stream": streams.stream_class,
            "Event": streams.event_class,
            "stream": streams.use,
            "current_stream": streams.current,
            "default_stream": lambda device=None: streams.default[streams.resolve(device).index],
            "synchronize": streams.synchronize,
            "_sleep": self._sleep,
            "is_current_stream_capturing": lambda: False,
            "mem_get_info": lambda _=None: (free, total),
            "memory_reserved": lambda _=None: 0,
            # Random numbers are the CPU's.
            "get_rng_state": lambda _=None: torch.get_rng_state(),
            "set_rng_state": lambda _, __=None: None,
            "get_device_properties": lambda _=None: SimpleNamespace(
                name="a GPU that is none", total_memory=total, L2_cache_size=2**20, major=9, minor=0
            ),
        }

    def _sleep(self, cycles: int) -> None:
        lane = self.streams.current(None).lane
        self.ledger.run(lane, self.host, "_sleep", seconds=cycles / CYCLES_PER_SECOND)

    def _submit(self, original: Callable[..., "Future[Any]"]) -> Callable[..., "_Joined"]:
        """Return a `submit` whose threads are recorded, too, and begin after their submitter."""

        def submit(
            pool: ThreadPoolExecutor, function: Callable[..., Any], *args: Any, **options: Any
        ) -> _Joined:
            begin = self.host.point()
            ends: list[Point] = []

            def run() -> Any:
                self.host.follow(begin)
                with Record(self.tensors):
                    try:
                        return function(*args, **options)
                    finally:
                        ends.append(self.host.point())

            return _Joined(original(pool, run), ends, self)

        return submit


class _Joined:
    """A future whose result orders the thread that asks for it behind the thread that made it."""

    def __init__(self, future: "Future[Any]", ends: list[Point], cuda: FakeCuda) -> None:
        self._future, self._ends, self._cuda = future, ends, cuda

    def result(self, timeout: float | None = None) -> Any:
        result = self._future.result(timeout)
        self._cuda.host.follow(self._ends[0])
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._future, name)
