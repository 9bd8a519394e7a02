"""Streams, events and the current device: what `torch.cuda` gives a program, on lanes.

Each behaves as CUDA says: an event that was never recorded is over, work for a device runs on that
device's current stream whatever the current device is, and a new thread begins on device 0.
"""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Protocol

import torch

from tests.cuda_kit.lanes import Lane, Ledger, Point, place

DeviceLike = torch.device | int | str | None


class Host(Protocol):
    """What streams need to know of the machine."""

    ledger: Ledger

    @property
    def host(self) -> Lane:
        """The lane of this thread."""
        ...

    def is_used(self, device: torch.device) -> bool:
        """Return whether a tensor was ever on the device."""
        ...


class Stream:
    """A stream of a device, as `torch.cuda.Stream`."""

    machine: "Streams"

    def __init__(
        self, device: DeviceLike = None, priority: int = 0, *, lane: Lane | None = None
    ) -> None:
        self.device = self.machine.resolve(device)
        self.priority = priority
        self.lane = self.machine.new_lane(self.device) if lane is None else lane

    def wait_stream(self, other: "Stream") -> None:
        """Run what follows here after everything given to the other stream so far."""
        self.machine.check(other.device, f"{self.lane.name} waits for {other.lane.name}")
        self.machine.check(self.device, f"{self.lane.name} waits for {other.lane.name}")
        self.lane.follow(other.lane.point())

    def wait_event(self, event: "Event") -> None:
        """Run what follows here after the event."""
        event.wait(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record an event here."""
        made = self.machine.event_class() if event is None else event
        made.record(self)
        return made

    def synchronize(self) -> None:
        """Block this thread until the stream is idle."""
        self.machine.check(self.device, f"the host waits for {self.lane.name}")
        self.machine.host.host.follow(self.lane.point())


class Event:
    """An event, as `torch.cuda.Event`."""

    machine: "Streams"

    def __init__(
        self,
        enable_timing: bool = False,  # noqa: FBT001, FBT002 - torch's signature
        blocking: bool = False,  # noqa: ARG002, FBT001, FBT002 - torch's signature; a fake event has no mode
        interprocess: bool = False,  # noqa: ARG002, FBT001, FBT002 - torch's signature; all is one process
    ) -> None:
        self.enable_timing = enable_timing
        self.device: torch.device | None = None
        self.point: Point | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Mark the end of what the stream was given so far.

        Raises:
            RuntimeError: it was recorded on another device before, as CUDA.
        """
        stream = self.machine.current(None) if stream is None else stream
        self.machine.check(stream.device, f"an event is recorded on {stream.lane.name}")
        if self.device not in {None, stream.device}:
            raise RuntimeError(
                f"Event device {self.device} does not match recording stream's device "
                f"{stream.device}."
            )
        self.device = stream.device
        self.point = stream.lane.point()

    def wait(self, stream: Stream | None = None) -> None:
        """Run what follows in the stream after the event."""
        stream = self.machine.current(None) if stream is None else stream
        self.machine.check(stream.device, f"{stream.lane.name} waits for an event")
        if self.point is not None:
            stream.lane.follow(self.point)

    def synchronize(self) -> None:
        """Block this thread until the event is over."""
        if self.point is not None:
            self.machine.host.host.follow(self.point)

    def query(self) -> bool:
        """Return whether the event is over: a fake one is, as soon as somebody asks."""
        self.synchronize()
        return True

    def elapsed_time(self, end: "Event") -> float:
        """Return the simulated milliseconds between two events.

        Raises:
            RuntimeError: one was not recorded, has no timing, or was not waited for, as CUDA.
        """
        if not (self.enable_timing and end.enable_timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self.point is None or end.point is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        host = self.machine.host.host
        if not (host.is_past(self.point) and host.is_past(end.point)):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (end.point.seconds - self.point.seconds) * 1e3


class _Thread(threading.local):
    """What every thread has of its own: the current device, and each device's current stream."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}


class Streams:
    """All devices' streams.

    Args:
        num_devices: that this process sees.
    """

    def __init__(self, host: Host, num_devices: int) -> None:
        self.host, self.num_devices = host, num_devices
        self.stream_class: type[Stream] = type("Stream", (Stream,), {"machine": self})
        self.event_class: type[Event] = type("Event", (Event,), {"machine": self})
        self._numbers = itertools.count(1)
        self.default = [
            self.stream_class(index, lane=Lane(f"cuda:{index}'s default stream", _cuda(index)))
            for index in range(num_devices)
        ]
        self._thread = _Thread()

    def new_lane(self, device: torch.device) -> Lane:
        """Return the lane of a new stream."""
        return Lane(f"{device}'s stream {next(self._numbers)}", device)

    def resolve(self, device: DeviceLike) -> torch.device:
        """Return a device with its index; the current one where none is named.

        Raises:
            RuntimeError: there is no such device, as CUDA.
        """
        if device is None:
            return _cuda(self._current_index())
        resolved = _cuda(device) if isinstance(device, int) else torch.device(device)
        if resolved.type != "cuda":
            return resolved
        # None without an index, whatever the stubs say.
        index = self._current_index() if str(resolved) == "cuda" else resolved.index
        if index >= self.num_devices:
            raise RuntimeError(f"CUDA error: invalid device ordinal {index}")
        return _cuda(index)

    def current(self, device: DeviceLike = None) -> Stream:
        """Return a device's current stream in this thread."""
        index = self.resolve(device).index
        return self._thread.streams.get(index, self.default[index])

    def lane(self, device: torch.device) -> Lane:
        """Return the lane that work for a device runs in."""
        return self.current(device).lane

    def check(self, device: torch.device, what: str) -> None:
        """Find a device that is used by mistake: no tensor of this process was ever there."""
        if not self.host.is_used(device):
            self.host.ledger.fault(f"{what}, and no tensor is on {device} (at {place()})")

    def set_device(self, device: DeviceLike) -> None:
        """Change this thread's current device."""
        self._thread.device = self.resolve(device).index

    @contextlib.contextmanager
    def on(self, device: DeviceLike) -> Iterator[None]:
        """Run with another current device, as `torch.cuda.device`."""
        before = self._thread.device
        self._thread.device = self.resolve(device).index
        try:
            yield
        finally:
            self._thread.device = before

    @contextlib.contextmanager
    def use(self, stream: Stream | None) -> Iterator[None]:
        """Run with another current stream, and its device, as `torch.cuda.stream`."""
        if stream is None:
            yield
            return
        index = stream.device.index
        before = self._thread.streams.get(index)
        with self.on(stream.device):
            self._thread.streams[index] = stream
            try:
                yield
            finally:
                self._thread.streams.pop(index)
                if before is not None:
                    self._thread.streams[index] = before

    def synchronize(self, device: DeviceLike = None) -> None:
        """Block this thread until a device's streams are idle."""
        resolved = self.resolve(device)
        self.check(resolved, f"the host waits for {resolved}")
        for lane in tuple(self.host.ledger.lanes_of(resolved)):
            self.host.host.follow(lane.point())

    def _current_index(self) -> int:
        return self._thread.device


def _cuda(index: int) -> torch.device:
    return torch.device("cuda", index)
