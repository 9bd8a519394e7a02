"""One chunk's states on this rank: values, master values and gradients, whole and in shards.

The `cache` gathers, reduces and drops chunks; the optimizer steps their shards.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import nn

from moetune.comm.group import Communicator
from moetune.comm.transfer import Wait, nothing
from moetune.domain.chunks import Chunk
from moetune.runtime.sharded.transfers import (
    ChunkStats,
    Placement,
    Traffic,
    start_reduce_scatter,
)

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
