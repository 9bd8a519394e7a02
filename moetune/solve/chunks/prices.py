"""Costs of one chunk's transfers and optimizer step, and the size from which it is worth it.

A shard is 1/ranks of a chunk. The host sends and receives shards; ranks gather shards into chunks
and scatter the sum of their gradients into shards (Elixir, "Fully symmetric partitioning").
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moetune.domain.chunks import Chunk, ChunkGroup
from moetune.domain.costs import Costs, Estimate, least_trust
from moetune.domain.samples import CollectiveOp, Direction
from moetune.solve.chunks.time import ChunkCost
from moetune.solve.layer.costs import NOTHING
from moetune.solve.model.groups import Group, Groups
from moetune.solve.states import FULL_BYTES

GOOD_SHARE = 0.9
"""Share of a transfer's best rate from which on larger chunks gain little."""
_SMALLEST_BYTES, _LARGEST_BYTES = 2**20, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPrices:
    """The costs of chunks in one layout.

    Args:
        groups: of the layout; its `data` hold the dense parameters, its `replicas` the experts.
        offload: shards live on the host, and so do their optimizer states.
        scatter: states are sharded; else whole on every rank, and gradients all-reduced.
    """

    costs: Costs
    groups: Groups
    dtype: str
    offload: bool = False
    scatter: bool = True

    def cost(self, chunk: Chunk) -> tuple[ChunkCost, tuple[Estimate, ...]]:
        """Return what the chunk costs, and the estimates behind it.

        Gradients go to the host in full precision, as masters take them.

        Raises:
            ProfileError: a copy or a collective was not measured.
        """
        ranks = chunk.group.ranks
        shard = chunk.num_bytes / ranks
        full = max(shard, chunk.num_elements / ranks * FULL_BYTES)
        fetch, store = self._copy("h2d", shard), self._copy("d2h", full)
        gather = self._collective("all_gather", chunk.group, shard)
        reduce = self._collective("reduce_scatter", chunk.group, chunk.num_bytes)
        update = self.update(chunk.num_elements / ranks, on_host=self.offload) or NOTHING
        found = (fetch, gather, reduce, store, update)
        fields = ("fetch", "gather", "reduce", "store", "update")
        seconds = {name: one.seconds for name, one in zip(fields, found, strict=True)}
        return ChunkCost(**seconds), found

    def resident(self, chunks: Sequence[Chunk]) -> ChunkCost:
        """Return what resident chunks, whole on every rank, cost together."""
        reduces = (self._collective("all_reduce", one.group, one.num_bytes) for one in chunks)
        update = self.update(sum(one.num_elements for one in chunks), on_host=False) or NOTHING
        return ChunkCost(reduce=sum(one.seconds for one in reduces), update=update.seconds)

    def update(self, num_elements: float, *, on_host: bool) -> Estimate | None:
        """Return the optimizer's step on so many parameters; None where it was not measured."""
        if not num_elements:
            return NOTHING
        ops = ("host_adam",) if self.has_host else ("host_adam", "adam")
        for op in ops if on_host else ("adam",):
            found = self.costs.rows_op(op=op, dtype=self.dtype, rows=num_elements, width=1)
            if found is not None:
                return found
        return None

    @property
    def copies_inline(self) -> bool:
        """Whether copies take the device's time: pageable memory, and a CPU's own."""
        return self.costs.copy_mode != "pinned"

    @property
    def has_host(self) -> bool:
        """Whether the host computes while the device does; a CPU is both."""
        return self.costs.copy_mode != "inline"

    def worthwhile_bytes(self, ranks: int) -> int:
        """Return the chunk from which on every transfer has a good share of its best rate.

        The best rate is that of a chunk of 1 GiB; by an α–β line the share is reached at 9·α/β.

        Args:
            ranks: of the group that shares the chunk.
        """
        group = ChunkGroup(dtype=self.dtype, ranks=ranks, label="dense")
        return max(_worthwhile(seconds) for seconds in self._transfers(group))

    def _transfers(self, group: ChunkGroup) -> list[Callable[[int], float]]:
        ranks = group.ranks
        if not self.scatter:
            return [lambda size: self._collective("all_reduce", group, size).seconds]
        return [
            lambda size: self._copy("h2d", size / ranks).seconds,
            lambda size: self._copy("d2h", size / ranks).seconds,
            lambda size: self._collective("all_gather", group, size / ranks).seconds,
            lambda size: self._collective("reduce_scatter", group, size).seconds,
        ]

    def _copy(self, direction: Direction, num_bytes: float) -> Estimate:
        if not self.offload:
            return NOTHING
        pinned = self.costs.copy_mode == "pinned"
        return self.costs.copy(direction=direction, pinned=pinned, num_bytes=num_bytes)

    def _collective(self, op: CollectiveOp, group: ChunkGroup, num_bytes: float) -> Estimate:
        if group.ranks == 1:
            return NOTHING
        place = self._place(group)
        return self.costs.collective(
            op=op, group_size=place.size, num_bytes=num_bytes, num_nodes=place.num_nodes
        )

    def _place(self, group: ChunkGroup) -> Group:
        return self.groups.replicas if group.label == "experts" else self.groups.data


def trust_of_all(estimates: Sequence[Estimate]) -> Estimate:
    """Return no time with the least trust of the estimates that take any."""
    trust = least_trust(one.trust for one in estimates if one.seconds)
    return Estimate(seconds=0.0, trust=trust)


def _worthwhile(seconds: Callable[[int], float]) -> int:
    largest = seconds(_LARGEST_BYTES)
    size = _SMALLEST_BYTES
    if not largest:
        return size
    while size < _LARGEST_BYTES and size / seconds(size) < GOOD_SHARE * _LARGEST_BYTES / largest:
        size *= 2
    return size
