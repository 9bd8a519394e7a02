"""Transfers of a model's chunks: their places, their collectives, and counts of bytes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from moetune.comm.group import Communicator
from moetune.comm.transfer import SideStream
from moetune.runtime.sharded.options import ShardOptions

REDUCTION = "the reduction of a chunk"


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
