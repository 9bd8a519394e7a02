"""One chunk's states on this rank: values, master values and gradients, whole and in shards.

The `cache` gathers, reduces and drops chunks; the optimizer steps their shards.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import nn

from moetune.comm.group import Communicator
from moetune.comm.transfer import SideStream, Wait, nothing
from moetune.domain.chunks import Chunk
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


Phase = Literal["away", "gathering", "values", "gradients", "reducing"]
"""Contents of the whole buffer: nothing; values being gathered; values, or gradients in the slots
in `arrived`; gradients alone; gradients being reduced."""


class StoredChunk:
    """A chunk on this rank.

    Its whole buffer has one storage for good, freed and allocated again as the chunk leaves and
    enters the cache. Parameters are views of it all the time, so that views that autograd saved
    remain valid (as in FSDP2).

    Args:
        parameters: by name; their data become views of this chunk.

    Attributes:
        low, high: this rank's shard, in elements of the chunk.
        master: values of the shard in at least float32.
        gradient: of the shard, as `master`; its values are valid if `has_gradient`.
        num_readers: calls of modules that need it now.
        arrived: parameters whose gradients are in their slots of the buffer.
    """

    def __init__(
        self,
        number: int,
        chunk: Chunk,
        parameters: Mapping[str, nn.Parameter],
        replicas: Communicator,
        placement: Placement,
        stats: ChunkStats,
    ) -> None:
        self.number, self.chunk, self.replicas = number, chunk, replicas
        self.names = tuple(slot.name for slot in chunk.slots)
        self.phase: Phase = "values"
        self.num_readers = 0
        self.arrived: set[str] = set()
        self._placement, self._stats = placement, stats
        self._wait: Wait | None = None
        self._end_last_gather: Wait = nothing
        self._end_last_reduce: Wait = nothing
        self._received: torch.Tensor | None = None
        dtype = getattr(torch, chunk.group.dtype)
        self.whole = torch.zeros(chunk.num_elements, dtype=dtype, device=placement.device)
        self._slots = self._views(parameters)
        for name, view in self._slots.items():
            view.copy_(parameters[name].detach())
            parameters[name].data = view
        share = chunk.num_elements // replicas.num_ranks
        self.low, self.high = replicas.rank * share, (replicas.rank + 1) * share
        self._payload = self._to_shard_memory(self.whole[self.low : self.high])
        self.master = self._payload
        if dtype.itemsize < torch.float32.itemsize and chunk.group.is_trainable:
            self.master = self._to_shard_memory(self.whole[self.low : self.high].float())
        self.gradient: torch.Tensor | None = None
        self.has_gradient = False
        if not self.is_offloaded:
            own = {id(values): _bytes(values) for values in (self._payload, self.master)}
            stats.allocated(sum(own.values()))
        self._count(chunk.num_bytes)
        self.drop()

    @property
    def is_offloaded(self) -> bool:
        """Whether this rank's shard is in host memory."""
        return self._placement.offload

    @property
    def has_unreduced_gradients(self) -> bool:
        """Whether the buffer has gradients that are not being reduced yet."""
        return bool(self.arrived) and self.phase != "reducing"

    def has_lost(self, names: frozenset[str]) -> bool:
        """Return whether gradients have overwritten these parameters' values in the buffer."""
        return self.phase in {"gradients", "reducing"} or not self.arrived.isdisjoint(names)

    def start_gather(self) -> None:
        """Allocate the whole buffer and start gathering the values."""
        self._allocate()
        self.phase = "gathering"
        stream = self._placement.gather_stream
        self._wait = stream.run(self._gather)
        self._end_last_gather = stream.mark()
        gathered, loaded = self._traffic(self.chunk.num_bytes, _bytes(self._payload))
        self._stats.moved(Traffic(gathers=1, gathered_bytes=gathered, loaded_bytes=loaded))

    def _gather(self) -> Wait | None:
        mine = self.whole[self.low : self.high]
        source = self._payload
        if self.replicas.num_ranks == 1 or source.device != mine.device:
            mine.copy_(source, non_blocking=True)
            source = mine
        return self._gather_from(self.whole, source) if self.replicas.num_ranks > 1 else None

    def _gather_from(self, whole: torch.Tensor, shard: torch.Tensor) -> Wait:
        return self.replicas.all_gather(whole, shard, "the gathering of a chunk").wait

    def finish_gather(self) -> None:
        """Wait for the values, if they are being gathered."""
        if self.phase == "gathering":
            self._finish_wait()
            self.phase = "values"

    def drop(self) -> None:
        """Free the whole buffer; the shards have all values."""
        self.finish_gather()
        self.whole.untyped_storage().resize_(0)
        self._count(-self.chunk.num_bytes)
        self.arrived.clear()
        self.phase = "away"

    def allocate_for_gradients(self) -> None:
        """Allocate the whole buffer for gradients alone."""
        self._allocate()
        self.phase = "gradients"

    def receive(self, name: str, gradient: torch.Tensor) -> None:
        """Copy a parameter's gradient into its slot, over values that are not needed any more."""
        if name in self.arrived:
            self._slots[name].add_(gradient)
        else:
            self._slots[name].copy_(gradient)
            self.arrived.add(name)

    def start_reduce(self) -> None:
        """Start reducing the ranks' gradients; missing ones are zeros."""
        for name in set(self.names) - self.arrived:
            self._slots[name].zero_()
        total = self._begin_sum()
        stream = self._placement.reduce_stream
        self._wait = stream.run_late(lambda: self._accumulate(total()))
        self._end_last_reduce = stream.mark()
        self.phase = "reducing"
        reduced, stored = self._traffic(self.chunk.num_bytes, _bytes(self.master))
        self._stats.moved(Traffic(reduces=1, reduced_bytes=reduced, stored_bytes=stored))

    def _traffic(self, wire_bytes: int, host_bytes: int) -> tuple[int, int]:
        """Return the bytes that cross the wire, and those to or from host memory."""
        is_wired = self.replicas.num_ranks > 1
        return wire_bytes if is_wired else 0, host_bytes if self.is_offloaded else 0

    def _begin_sum(self) -> Callable[[], torch.Tensor]:
        """Start summing over the ranks; return the function that waits for this rank's part."""
        if self.replicas.num_ranks == 1:
            return lambda: self.whole
        self._received, total = start_reduce_scatter(self.replicas, self.whole, self.master.dtype)
        self._stats.allocated(_bytes(self._received))
        return total

    def finish_reduce(self) -> None:
        """Wait for the sum, add its mean to this rank's gradient and free the buffer."""
        if self.phase != "reducing":
            return
        self._finish_wait()
        if self._received is not None:
            self._stats.allocated(-_bytes(self._received))
            self._received = None
        self.drop()

    def discard_gradients(self) -> None:
        """Discard gradients of a backward pass that did not end; none is being reduced."""
        if self.arrived or self.phase == "gradients":
            self.drop()
        self.num_readers = 0

    def make_readable(self) -> None:
        """Block the host until this chunk's gradient is in its memory; others may be on the way."""
        if self.is_offloaded:
            self._end_last_reduce()

    def make_writable(self) -> None:
        """Block the host, which waited for no gather, until none reads a shard in its memory."""
        if self.is_offloaded:
            self._end_last_gather()

    def publish(self) -> None:
        """Copy the master's values to the shard that gathers read."""
        if self._payload is not self.master:
            self._payload.copy_(self.master, non_blocking=self.is_offloaded)

    def gather_whole(self, shard: torch.Tensor) -> torch.Tensor:
        """Return a state, such as the master, whole on the device, from the ranks' shards."""
        source = shard.detach().to(self.whole.device)
        if self.replicas.num_ranks == 1:
            return source
        whole = torch.empty(self.chunk.num_elements, dtype=source.dtype, device=source.device)
        self._gather_from(whole, source)()
        return whole

    def _finish_wait(self) -> None:
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()

    def _accumulate(self, total: torch.Tensor) -> None:
        """Add the scaled sum to this rank's gradient."""
        gradient = self._own_gradient()
        total = total.to(self.master.dtype)
        if self._placement.scale != 1:
            total.mul_(self._placement.scale)
        if self.has_gradient:
            total.add_(gradient.to(total.device, non_blocking=True))
        gradient.copy_(total, non_blocking=True)
        self.has_gradient = True

    def _own_gradient(self) -> torch.Tensor:
        """Return the buffer of this rank's gradient."""
        if self.gradient is None:
            self.gradient = torch.empty_like(self.master, pin_memory=self.master.is_pinned())
            if not self.is_offloaded:
                self._stats.allocated(_bytes(self.gradient))
        return self.gradient

    def _allocate(self) -> None:
        self.whole.untyped_storage().resize_(self.chunk.num_bytes)
        self._count(self.chunk.num_bytes)

    def _count(self, num_bytes: int) -> None:
        """Count bytes of the whole buffer; fused chunks are not the cache's."""
        self._stats.allocated(num_bytes, is_cached=not self.chunk.is_fused)

    def _views(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        return {
            slot.name: self.whole[slot.offset : slot.offset + slot.num_elements].view(
                parameters[slot.name].shape
            )
            for slot in self.chunk.slots
        }

    def _to_shard_memory(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy in the memory of shards: the device's or the host's."""
        if not self.is_offloaded:
            return values.clone()
        pin = self._placement.pin and values.device.type != "cpu"
        return torch.empty_like(values, device="cpu", pin_memory=pin).copy_(values)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
