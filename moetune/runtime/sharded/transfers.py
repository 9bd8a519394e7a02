"""Transfers of a model's chunks: their streams, their collectives, and counts of bytes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from moetune.comm.group import Communicator
from moetune.runtime.sharded.options import ShardOptions

REDUCTION = "the reduction of a chunk"
Wait = Callable[[], None]
"""Makes the current stream, or the host on a CPU, wait for a transfer."""


class SideStream:
    """The stream for transfers in one direction, which run one after another.

    On a CPU there is none: transfers take the caller's time. Buffers are allocated and freed on
    the computing stream, which waits for the transfer's event before it frees: `record_stream` is
    not needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, transfer: Callable[[], Wait | None]) -> Wait:
        """Begin a transfer behind everything issued to the current stream.

        Args:
            transfer: starts it; a wait that it returns runs before that for the stream.
        """
        if self._stream is None:
            return transfer() or nothing
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            wait = transfer()
        done = self._stream.record_event()

        def join() -> None:
            if wait is not None:
                wait()
            torch.cuda.current_stream(self._device).wait_event(done)

        return join

    def run_late(self, transfer: Callable[[], None]) -> Wait:
        """Begin a transfer as `run` does; on a CPU only when the returned wait is called."""
        return transfer if self._stream is None else self.run(transfer)

    def mark(self) -> Wait:
        """Return a function that blocks the host until the transfers so far are over."""
        return nothing if self._stream is None else self._stream.record_event().synchronize

    def synchronize(self) -> None:
        """Block the host until the stream is idle."""
        if self._stream is not None:
            self._stream.synchronize()


def nothing() -> None:
    """Wait for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Devices and streams of a model's chunks.

    Args:
        device: of the computation.
        offload: as in `moetune.shard`.
        pin: shards in host memory are page-locked.
        scale: factor of summed gradients: 1 / the ranks of the data-parallel group.
        gather_stream, reduce_stream: for incoming values, and for outgoing gradients.
    """

    device: torch.device
    offload: bool
    pin: bool
    scale: float
    gather_stream: SideStream
    reduce_stream: SideStream

    @classmethod
    def of(cls, device: torch.device, options: ShardOptions, num_ranks: int) -> "Placement":
        """Return the placement that options ask for, over so many data-parallel ranks."""
        return cls(
            device=device, offload=options.offload, pin=options.pin, scale=1 / num_ranks,
            gather_stream=SideStream(device), reduce_stream=SideStream(device),
        )  # fmt: skip


class Traffic(NamedTuple):
    """Transfers since the model was sharded, in bytes of whole chunks.

    Args:
        gathers, reduces: number of chunks gathered, and of chunks reduced.
        gathered_bytes, reduced_bytes: a chunk's bytes for every all-gather and reduce-scatter.
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
        return Traffic(*(now - before for now, before in zip(self, earlier, strict=True)))


@dataclass(slots=True)
class ChunkStats:
    """Counts of transfers and of the device bytes of chunks.

    Args:
        cache_bytes, peak_cache_bytes: of whole chunks in the cache.
        device_bytes, peak_device_bytes: of whole chunks, shards and gradients on the device.
    """

    traffic: Traffic = field(default_factory=Traffic)
    cache_bytes: int = 0
    peak_cache_bytes: int = 0
    device_bytes: int = 0
    peak_device_bytes: int = 0

    def allocated(self, num_bytes: int, *, is_cached: bool = False) -> None:
        """Count bytes allocated on the device; negative ones were freed."""
        self.device_bytes += num_bytes
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)
        if is_cached:
            self.cache_bytes += num_bytes
            self.peak_cache_bytes = max(self.peak_cache_bytes, self.cache_bytes)

    def moved(self, traffic: Traffic) -> None:
        """Count a transfer."""
        self.traffic = Traffic(*map(sum, zip(self.traffic, traffic, strict=True)))


def start_reduce_scatter(
    replicas: Communicator, whole: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """Start a reduce-scatter of `whole`; return its buffer, and what waits for this rank's sum.

    Where the backend's own sends as little and its sum has the dtype, it is that. Else it is
    an all-to-all and a local sum: gloo's own is an all-reduce, which sends at least twice as
    much, and a sum of bfloat16 values on the way would be rounded at every rank.

    Args:
        dtype: of the sum.
    """
    is_own = whole.is_cuda and whole.dtype == dtype and whole.is_floating_point()
    received = whole.new_empty(whole.numel() // replicas.num_ranks if is_own else whole.numel())
    if is_own:
        transfer = replicas.reduce_scatter(received, whole, REDUCTION)
    else:  # as bytes: backends lack some dtypes that need only be moved
        into, parts = received.view(torch.uint8), whole.view(torch.uint8)
        transfer = replicas.all_to_all(into, parts, None, None, REDUCTION)

    def total() -> torch.Tensor:
        transfer.wait()
        return received if is_own else received.view(replicas.num_ranks, -1).sum(dim=0, dtype=dtype)

    return received, total
