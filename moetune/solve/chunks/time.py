"""Time of a step over chunks, simulated: transfers, computation and optimizer that overlap."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moetune.domain.chunks import Chunk, ChunkGroup, Use
from moetune.domain.cost_keys import CollectiveKey, CopyKey, RowsKey
from moetune.domain.costs import Costs, Estimate, seconds_if_known
from moetune.domain.samples import CollectiveOp, Direction
from moetune.solve.chunks.cache import AT_START, Gather, Replay
from moetune.solve.layer.operations import NOTHING
from moetune.solve.layer.totals import total
from moetune.solve.model.groups import Group, Groups
from moetune.solve.runtime import FULL_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCost:
    """Seconds of one chunk's operations; 0 for those that it does not need.

    Args:
        fetch: copy of its shard from the host.
        gather: all-gather of its shards.
        reduce: reduce-scatter of its gradients.
        store: copy of the gradient shard to the host.
        update: the optimizer's step on its shard.
    """

    fetch: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    store: float = 0.0
    update: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTime:
    """Time of one micro-batch, and what the optimizer adds to a step.

    Args:
        seconds: forward and backward pass with all transfers.
        compute_seconds: all uses, without transfers.
        transfer_seconds: all transfers one after another.
        optimizer_seconds: what the optimizer adds where chunks are stepped as they are reduced.
        update_seconds: the optimizer's step on all chunks, one after another.
    """

    seconds: float
    compute_seconds: float
    transfer_seconds: float
    optimizer_seconds: float
    update_seconds: float

    @property
    def exposed_seconds(self) -> float:
        """Seconds that the transfers add to the computation."""
        return max(0.0, self.seconds - self.compute_seconds)

    def step_seconds(self, num_micro_batches: int) -> float:
        """Return the time of a whole step."""
        return num_micro_batches * self.seconds + self.added_seconds(num_micro_batches)

    def added_seconds(self, num_micro_batches: int) -> float:
        """Return the time that the optimizer adds to a step.

        Gradients of several micro-batches are complete only after the last one: no chunk is
        stepped before.
        """
        return self.optimizer_seconds if num_micro_batches == 1 else self.update_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkDevice:
    """Engines of a device and its host that work at the same time.

    Args:
        copies_inline: the device itself copies, as a CPU does.
        updates_on_host: the optimizer runs on the host as soon as a gradient shard is there;
            otherwise on the device after the backward pass.
    """

    copies_inline: bool
    updates_on_host: bool


def simulate(
    order: Sequence[Use],
    found: Replay,
    *,
    costs: Mapping[int, ChunkCost],
    machine: ChunkDevice,
    resident: ChunkCost | None = None,
) -> ChunkTime:
    """Return the time of a steady state's micro-batch.

    Args:
        found: gathers of the order, from `solve.chunks.cache.replay`.
        costs: of every chunk of the order.
        resident: of all chunks that are always resident, together; they are reduced last.
    """
    runs = [_Step(gathers, costs, machine) for gathers in found.steps]
    for run in runs:
        run.all(order, resident or ChunkCost())
    count = len(runs)
    return ChunkTime(
        seconds=sum(run.end for run in runs) / count,
        compute_seconds=sum(use.seconds for use in order),
        transfer_seconds=sum(run.engines.transferred for run in runs) / count,
        optimizer_seconds=sum(run.update_end - run.end for run in runs) / count,
        update_seconds=sum(run.updated for run in runs) / count,
    )


class _Engines:
    """Engines that do one operation after another each, and the time when each is free."""

    def __init__(self, machine: ChunkDevice) -> None:
        self._machine = machine
        self._free: dict[str, float] = {}
        self.transferred = 0.0

    def run(self, name: str, seconds: float, *, ready: float) -> float:
        """Append work to an engine and return its end; `ready` where there is no work."""
        if not seconds:
            return ready
        if name in {"fetch", "store", "link"}:
            self.transferred += seconds
        if name in {"fetch", "store"} and self._machine.copies_inline:
            name = "device"
        end = max(ready, self._free.get(name, 0.0)) + seconds
        self._free[name] = end
        return end

    def free(self, name: str) -> float:
        """Return when the engine has done all its work."""
        return self._free.get(name, 0.0)


class _Step:
    """One micro-batch, use by use."""

    def __init__(
        self, gathers: Sequence[Gather], costs: Mapping[int, ChunkCost], machine: ChunkDevice
    ) -> None:
        self.engines = _Engines(machine)
        self.end = self.update_end = 0.0
        self._gathers = deque(gathers)
        self._costs = costs
        self._on_host = machine.updates_on_host
        self._used_until = {AT_START: 0.0}
        self._reduced_until: dict[int, float] = {}
        self._whole: dict[int, float] = {}
        self._device_update = self._stored = self.updated = 0.0

    def all(self, order: Sequence[Use], resident: ChunkCost) -> None:
        """Run the uses, then reduce the resident chunks, and update the states on the device."""
        for index, use in enumerate(order):
            while self._gathers and self._gathers[0].free_after < index:
                self._gather(self._gathers.popleft())
            self._compute(index, use)
            self._reduce(index, use)
        self.updated += resident.update
        device = self.engines.free("device")
        self.end = max(self.engines.run("link", resident.reduce, ready=device), self._stored)
        self.update_end = max(self.update_end, self.end + resident.update + self._device_update)

    def _gather(self, one: Gather) -> None:
        times = self._reduced_until if one.was_reduced else self._used_until
        cost = self._costs[one.chunk]
        here = self.engines.run("fetch", cost.fetch, ready=times[one.free_after])
        self._whole[one.chunk] = self.engines.run("link", cost.gather, ready=here)

    def _compute(self, index: int, use: Use) -> None:
        ready = max((self._whole.get(chunk, 0.0) for chunk in use.chunks), default=0.0)
        ready = max(ready, self.engines.free("device"))
        self._used_until[index] = self.engines.run("device", use.seconds, ready=ready)

    def _reduce(self, index: int, use: Use) -> None:
        freed = done = self._used_until[index]
        for chunk in use.leaves:
            cost = self._costs[chunk]
            reduced = self.engines.run("link", cost.reduce, ready=done)
            stored = self.engines.run("store", cost.store, ready=reduced)
            freed, self._stored = max(freed, stored), max(self._stored, stored)
            self.updated += cost.update
            if self._on_host:
                updated = self.engines.run("host", cost.update, ready=stored)
                self.update_end = max(self.update_end, updated)
            else:
                self._device_update += cost.update
        self._reduced_until[index] = freed


GOOD_SHARE = 0.9
"""Share of a transfer's best rate from which on larger chunks gain little."""
_SMALLEST_BYTES, _LARGEST_BYTES = 2**20, 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPrices:
    """The costs of chunks in one layout.

    Args:
        groups: of the layout: its `data` group shares dense parameters, its `replicas` experts.
        offload: shards live on the host, and so do their optimizer states.
        scatter: states are sharded; else whole on every rank, with all-reduced gradients.
    """

    costs: Costs
    groups: Groups
    dtype: str
    offload: bool = False
    scatter: bool = True

    def cost(self, chunk: Chunk) -> tuple[ChunkCost, tuple[Estimate, ...]]:
        """Return the chunk's costs, and the estimates behind them.

        Gradients go to the host in full precision, which master parameters need.

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
        """Return the costs of all resident chunks together, which are whole on every rank."""
        reduces = (self._collective("all_reduce", one.group, one.num_bytes) for one in chunks)
        update = self.update(sum(one.num_elements for one in chunks), on_host=False) or NOTHING
        return ChunkCost(reduce=sum(one.seconds for one in reduces), update=update.seconds)

    def update(self, num_elements: float, *, on_host: bool) -> Estimate | None:
        """Return the optimizer's step on so many parameters; None where it was not measured."""
        if not num_elements:
            return NOTHING
        ops = ("host_adam",) if self.has_host else ("host_adam", "adam")
        for op in ops if on_host else ("adam",):
            found = seconds_if_known(self.costs, RowsKey(op, self.dtype), num_elements)
            if found is not None:
                return found
        return None

    @property
    def copies_inline(self) -> bool:
        """Whether copies take the device's time: pageable memory, and a CPU's own."""
        return not self.pins_host

    @property
    def pins_host(self) -> bool:
        """Whether offloaded states are in page-locked memory."""
        return self.costs.copy_mode == "pinned"

    @property
    def has_host(self) -> bool:
        """Whether the host computes while the device does; a CPU is both."""
        return self.costs.copy_mode != "inline"

    def worthwhile_bytes(self, ranks: int) -> int:
        """Return the size of chunk from which on all transfers run near their best rate.

        The best rate is that of a chunk of 1 GiB; on an α–β line 90 % of it is reached at 9·α/β.

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
        return self.costs.seconds(CopyKey(direction, self.pins_host), num_bytes)

    def _collective(self, op: CollectiveOp, group: ChunkGroup, num_bytes: float) -> Estimate:
        if group.ranks == 1:
            return NOTHING
        place = self._place(group)
        return self.costs.seconds(CollectiveKey(op, place.size, place.num_nodes), num_bytes)

    def _place(self, group: ChunkGroup) -> Group:
        return self.groups.replicas if group.label == "experts" else self.groups.data


def trust_of_all(estimates: Sequence[Estimate]) -> Estimate:
    """Return an estimate of 0 s with the least trust, and the doubts, of those above 0 s."""
    return total(*(one for one in estimates if one.seconds))._replace(seconds=0.0)


def _worthwhile(seconds: Callable[[int], float]) -> int:
    largest = seconds(_LARGEST_BYTES)
    size = _SMALLEST_BYTES
    if not largest:
        return size
    while size < _LARGEST_BYTES and size / seconds(size) < GOOD_SHARE * _LARGEST_BYTES / largest:
        size *= 2
    return size
