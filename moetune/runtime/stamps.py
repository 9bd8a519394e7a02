"""Points in time on the clock of a device: the host's, or events of a GPU's streams."""

import time
from typing import Protocol, Self

import torch


class Stamp(Protocol):
    """A point in time."""

    def is_over(self) -> bool:
        """Return whether it has passed."""

    def since(self, earlier: Self) -> float:
        """Return the seconds from an earlier stamp of the same device, once this one has passed."""


class HostStamp:
    """The host's time when it is made."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def is_over(self) -> bool:
        """Return True."""
        return True

    def since(self, earlier: Self) -> float:
        """Return the seconds from an earlier stamp."""
        return self.seconds - earlier.seconds


class CudaStamp:
    """An event of a stream: the host's clock would time launches."""

    __slots__ = ("event",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(stream)

    def is_over(self) -> bool:
        """Return whether the stream has got here."""
        return bool(self.event.query())

    def since(self, earlier: Self) -> float:
        """Return the seconds from an earlier stamp; wait until the stream gets here."""
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1e3


def stamp_now(device: torch.device) -> Stamp:
    """Return the host's time, or an event of the device's current stream."""
    if device.type == "cuda":
        return CudaStamp(torch.cuda.current_stream(device))
    return HostStamp()
