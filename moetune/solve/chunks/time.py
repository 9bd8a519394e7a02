"""Time of a step in chunks: transfers, computation and optimizer on engines that overlap."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moetune.domain.chunks import Use
from moetune.solve.chunks.cache import AT_START, Gather, Replay


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCost:
    """Seconds of what one chunk goes through; 0 for what it does not.

    Args:
        fetch: its shard's way from the host.
        gather: its shards' way to all ranks.
        reduce: its gradients' way to their shards' ranks.
        store: the gradient shard's way to the host.
        update: the optimizer's step on its shard.
    """

    fetch: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    store: float = 0.0
    update: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTime:
    """One micro-batch, and what the optimizer adds to the last one of a step.

    Args:
        seconds: forward and backward pass with all transfers.
        compute_seconds: the uses alone.
        transfer_seconds: what the engines work, in all.
        optimizer_seconds: what the optimizer's step adds where chunks are stepped as they come.
        update_seconds: the optimizer's step on all chunks.
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
        """Return what the optimizer adds to a step.

        Gradients of several micro-batches are complete only behind the last: no chunk is stepped
        before.
        """
        return self.optimizer_seconds if num_micro_batches == 1 else self.update_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkDevice:
    """Engines of a device and its host that work at the same time.

    Args:
        copies_inline: the device itself copies, as a CPU does.
        updates_on_host: the optimizer runs on the host as soon as a gradient shard is there;
            otherwise on the device behind the backward pass.
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
        found: what `chunk_cache.replay` says of the order.
        costs: of every chunk of the order.
        resident: of all chunks that never leave, together; they are reduced last.
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
    """Engines that each do one thing after another, and when they are free."""

    def __init__(self, machine: ChunkDevice) -> None:
        self._machine = machine
        self._free: dict[str, float] = {}
        self.transferred = 0.0

    def run(self, name: str, seconds: float, *, ready: float) -> float:
        """Put work on an engine and return its end; no work ends when it is ready."""
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
        """Run the uses, then reduce the resident chunks, and update what the device has."""
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
