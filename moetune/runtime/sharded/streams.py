"""Transfers beside the computation: on a stream of their own where the device is a GPU."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

Wait = Callable[[], None]
"""Makes what comes next wait for a transfer."""


class SideStream:
    """Where transfers of one direction run, one after another.

    On a CPU nothing runs by itself: transfers take the caller's time.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, transfer: Callable[[], Wait | None]) -> Wait:
        """Begin a transfer behind everything that the current stream has been given.

        Args:
            transfer: may itself return a wait, which is then the current stream's to make.
        """
        if self._stream is None:
            return transfer() or _nothing
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            wait = transfer()
        done = self._stream.record_event()

        def join() -> None:
            if wait is not None:
                wait()
            torch.cuda.current_stream().wait_event(done)

        return join

    def run_late(self, transfer: Callable[[], None]) -> Wait:
        """As `run`, of what a CPU should begin only when somebody waits for it."""
        return transfer if self._stream is None else self.run(transfer)

    def synchronize(self) -> None:
        """Let the host wait for everything on the stream."""
        if self._stream is not None:
            self._stream.synchronize()


def _nothing() -> None:
    """Wait for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Transfers since the beginning, counted by a chunk's own bytes.

    Args:
        gathers, reduces: chunks that were made whole, and whose gradients were added up.
        gathered_bytes: a chunk's bytes for every all-gather.
        reduced_bytes: a chunk's bytes for every reduce-scatter, twice that for an all-reduce.
        loaded_bytes, stored_bytes: of shards that came from host memory, and of gradients
            that went there.
    """

    gathers: int = 0
    reduces: int = 0
    gathered_bytes: int = 0
    reduced_bytes: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0

    @property
    def communicated_bytes(self) -> int:
        """Bytes between ranks: 2M a step where the cache holds everything."""
        return self.gathered_bytes + self.reduced_bytes

    def __sub__(self, earlier: "Traffic") -> "Traffic":
        return Traffic(
            gathers=self.gathers - earlier.gathers,
            reduces=self.reduces - earlier.reduces,
            gathered_bytes=self.gathered_bytes - earlier.gathered_bytes,
            reduced_bytes=self.reduced_bytes - earlier.reduced_bytes,
            loaded_bytes=self.loaded_bytes - earlier.loaded_bytes,
            stored_bytes=self.stored_bytes - earlier.stored_bytes,
        )


@dataclass(slots=True)
class Ledger:
    """Counts transfers and the device bytes of chunks, as they come and go.

    Args:
        cache_bytes, peak_cache_bytes: of whole chunks in the cache.
        device_bytes, peak_device_bytes: of everything that chunks keep on the device.
    """

    traffic: Traffic = field(default_factory=Traffic)
    cache_bytes: int = 0
    peak_cache_bytes: int = 0
    device_bytes: int = 0
    peak_device_bytes: int = 0

    def hold(self, num_bytes: int, *, is_cached: bool = False) -> None:
        """Count bytes that were allocated on the device, or freed where negative."""
        self.device_bytes += num_bytes
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)
        if is_cached:
            self.cache_bytes += num_bytes
            self.peak_cache_bytes = max(self.peak_cache_bytes, self.cache_bytes)

    def gathered(self, *, communicated_bytes: int, loaded_bytes: int) -> None:
        """Count a chunk that was made whole."""
        now = self.traffic
        self.traffic = replace(
            now,
            gathers=now.gathers + 1,
            gathered_bytes=now.gathered_bytes + communicated_bytes,
            loaded_bytes=now.loaded_bytes + loaded_bytes,
        )

    def reduced(self, *, communicated_bytes: int, stored_bytes: int) -> None:
        """Count a chunk whose gradients were added up."""
        now = self.traffic
        self.traffic = replace(
            now,
            reduces=now.reduces + 1,
            reduced_bytes=now.reduced_bytes + communicated_bytes,
            stored_bytes=now.stored_bytes + stored_bytes,
        )
