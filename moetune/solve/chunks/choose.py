"""Size of chunks and of their cache: Elixir's [S_FLAG, O_FLAG, C_SIZE], solved.

Chunks are as large as the links need, and then of the size that wastes the least. The cache is
the smallest one whose step is as short as the largest cache's that fits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moetune.domain.chunks import (
    Chunk,
    PackedParameter,
    Use,
    by_group,
    pack,
    rounded_elements,
    wasted_bytes,
)
from moetune.domain.costs import Estimate
from moetune.domain.model_plan import Chunks, ModelMemory
from moetune.domain.units import dtype_bytes, pinned_bytes
from moetune.solve.chunks.cache import FEWEST_PLACES, fewest_places, replay
from moetune.solve.chunks.time import (
    ChunkCost,
    ChunkDevice,
    ChunkPrices,
    ChunkTime,
    simulate,
    trust_of_all,
)
from moetune.solve.chunks.uses import Module, uses_of
from moetune.solve.runtime import StateBytes

CACHE_TOLERANCE = 0.01
"""A cache is large enough when its step is at most this share longer than the largest cache's."""
_NUM_SIZES = 48
_GOOD_PLACES = 4
"""Chunks are so small that at least this many fit, unless the largest parameter is larger."""
_SPAN = 2
"""Sizes are tried up to this multiple of the smallest worthwhile one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkChoice:
    """Size of chunks and cache for a model's states, with its time and memory.

    Args:
        num_chunks: chunks that are gathered and evicted.
        num_places: of the cache, of one chunk each.
        num_gathers: of one micro-batch.
        gathered_bytes, reduced_bytes: of one micro-batch, in whole chunks.
        host_bytes: on this rank's host.
        trust: of the transfers.
    """

    chunks: Chunks
    num_chunks: int
    num_places: int
    num_gathers: float
    gathered_bytes: float
    reduced_bytes: int
    time: ChunkTime
    memory: ModelMemory
    host_bytes: int
    trust: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkBudget:
    """The memory that chunks may take.

    Args:
        device_bytes: what activations and buffers leave of the device.
        host_bytes: of the host, for one rank; None where unknown.
        activation_bytes, buffer_bytes: also on the device.
    """

    device_bytes: int
    host_bytes: int | None
    activation_bytes: int
    buffer_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A model's parameters in chunks, and the location of their states.

    Args:
        each: bytes of a parameter and of its states.
        pins_host: offloaded shards and gradients are in page-locked memory.
    """

    chunks: tuple[Chunk, ...]
    chunk_bytes: int
    each: StateBytes
    offload: bool
    pins_host: bool = False

    @property
    def moving(self) -> Mapping[int, Chunk]:
        """The chunks that are gathered and evicted, by their index.

        Fused ones are always resident, and so are those of a single rank that are not offloaded.
        """
        return {
            index: one
            for index, one in enumerate(self.chunks)
            if not one.is_fused and (self.offload or one.group.ranks > 1)
        }

    @property
    def resident(self) -> tuple[Chunk, ...]:
        """The chunks that are always whole on the device."""
        moving = self.moving
        return tuple(one for index, one in enumerate(self.chunks) if index not in moving)

    @property
    def shard_elements(self) -> int:
        """Elements of this rank's shards."""
        return sum(one.num_elements // one.group.ranks for one in self.moving.values())

    @property
    def place_bytes(self) -> int:
        """Bytes of one place of the cache; 0 where all chunks are resident."""
        return self.chunk_bytes if self.moving else 0

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest parameter."""
        slots = (slot for chunk in self.chunks for slot in chunk.slots)
        return max(slot.num_elements for slot in slots) * self.each.parameter

    @property
    def host_bytes(self) -> int:
        """Bytes that this rank has on its host: shards, their gradients and optimizer states."""
        if not self.offload:
            return 0
        needed_bytes = self.shard_elements * self.each.total
        return needed_bytes + (self._rounding_bytes() if self.pins_host else 0)

    def _rounding_bytes(self) -> int:
        """Return what pinned memory takes beyond the sizes: of values, masters and gradients."""
        each = self.each
        values = {each.parameter, each.gradient}  # a master where they differ
        sizes = [
            one.num_elements // one.group.ranks * size
            for one in self.moving.values()
            for size in (*values, each.gradient)
        ]
        return sum(pinned_bytes(size) - size for size in sizes)

    def memory(self, num_places: int, budget: ChunkBudget) -> ModelMemory:
        """Return the bytes on the device with a cache of so many places.

        That includes the largest gradient, until it is copied to its chunk's place.
        """
        on_device = sum(one.num_elements for one in self.resident)
        on_device += 0 if self.offload else self.shard_elements
        sizes = {
            "parameter_bytes": num_places * self.place_bytes + on_device * self.each.parameter,
            "gradient_bytes": on_device * self.each.gradient + self.largest_bytes,
            "optimizer_bytes": on_device * self.each.optimizer,
            "activation_bytes": budget.activation_bytes,
            "buffer_bytes": budget.buffer_bytes,
        }
        return ModelMemory(**sizes, total_bytes=sum(sizes.values()))

    def most_places(self, budget: ChunkBudget) -> int:
        """Return the places that fit into the device's memory; at most one for each chunk."""
        left = budget.device_bytes + budget.activation_bytes + budget.buffer_bytes
        left -= self.memory(0, budget).total_bytes
        most = max(len(self.moving), FEWEST_PLACES)
        return min(left // self.place_bytes, most) if self.place_bytes else most * (left >= 0)


def pack_modules(
    modules: Sequence[Module], *, prices: ChunkPrices, each: StateBytes, budget: ChunkBudget | None
) -> Packed:
    """Pack the parameters into chunks of the size that wastes the least.

    Sizes range from the smallest that the links use well and that holds the largest parameter, to
    twice that, and leave memory for some chunks on the device. All groups have the same size.

    Args:
        budget: None for any size.
    """
    parameters = [parameter for module in modules for parameter in module.parameters]
    widest = max((one.group for one in parameters), key=lambda group: group.ranks)
    grain = dtype_bytes(widest.dtype)
    largest = max(one.num_elements for one in parameters) * grain
    low = max(prices.worthwhile_bytes(widest.ranks), largest)
    high = low * _SPAN
    if budget is not None:
        high = min(
            high, (budget.device_bytes - _shard_bytes(parameters, each, prices)) // _GOOD_PLACES
        )
    low, high = min(low, max(high, largest)), max(high, largest)
    sizes = (
        rounded_elements(widest, low + (high - low) * step // _NUM_SIZES) * grain
        for step in range(_NUM_SIZES + 1)
    )
    groups = by_group(parameters)
    best = min(
        dict.fromkeys(sizes), key=lambda size: (wasted_bytes(groups, chunk_bytes=size), size)
    )
    return Packed(
        chunks=pack(parameters, chunk_bytes=best),
        chunk_bytes=best,
        each=each,
        offload=prices.offload,
        pins_host=prices.pins_host,
    )


def _shard_bytes(
    parameters: Sequence[PackedParameter], each: StateBytes, prices: ChunkPrices
) -> int:
    """Return roughly the bytes of shards and their states on the device."""
    shards = sum(one.num_elements // one.group.ranks for one in parameters)
    return 0 if prices.offload else shards * each.total


def choose_chunks(
    modules: Sequence[Module],
    packed: Packed,
    *,
    prices: ChunkPrices,
    budget: ChunkBudget,
    recompute: bool,
) -> ChunkChoice | None:
    """Return the smallest cache whose step is as short as the largest cache's that fits.

    Args:
        modules: with their times, for one size of micro-batch.

    Returns:
        None where no cache fits, or the host has too little memory.

    Raises:
        ProfileError: a copy or a collective was not measured.
    """
    order = uses_of(modules, packed.moving, recompute=recompute)
    most, fewest = packed.most_places(budget), fewest_places(order)
    if budget.host_bytes is not None and packed.host_bytes > budget.host_bytes:
        return None
    if most < fewest:
        return None
    trial = _Trial(order, packed, prices)
    return _choice(trial, _smallest_as_fast(trial, fewest, most), order, packed, budget)


def time_chunks(
    modules: Sequence[Module],
    packed: Packed,
    *,
    prices: ChunkPrices,
    num_places: int,
    recompute: bool,
) -> ChunkTime:
    """Return the time with a cache of so many places.

    Args:
        modules: with their times, for one size of micro-batch.

    Raises:
        ProfileError: a copy or a collective was not measured.
    """
    order = uses_of(modules, packed.moving, recompute=recompute)
    return _Trial(order, packed, prices).time(num_places)


def _choice(
    trial: "_Trial", num_places: int, order: Sequence[Use], packed: Packed, budget: ChunkBudget
) -> ChunkChoice:
    found = replay(order, num_places=num_places)
    gathered = [gather.chunk for step in found.steps for gather in step]
    moving = packed.moving
    return ChunkChoice(
        chunks=Chunks(
            chunk_bytes=packed.chunk_bytes,
            cache_bytes=num_places * packed.chunk_bytes,
            scatter=True,
            offload=packed.offload,
        ),
        num_chunks=len(moving),
        num_places=num_places,
        num_gathers=found.num_gathers,
        gathered_bytes=sum(moving[one].num_bytes for one in gathered) / len(found.steps),
        reduced_bytes=sum(moving[one].num_bytes for use in order for one in use.leaves),
        time=trial.time(num_places),
        memory=packed.memory(num_places, budget),
        host_bytes=packed.host_bytes,
        trust=trial.trust,
    )


class _Trial:
    """Times of one order with caches of several sizes, each simulated once."""

    def __init__(self, order: Sequence[Use], packed: Packed, prices: ChunkPrices) -> None:
        self._order = order
        self._machine = ChunkDevice(
            copies_inline=prices.copies_inline, updates_on_host=prices.offload and prices.has_host
        )
        kinds: dict[tuple[object, int], tuple[ChunkCost, tuple[Estimate, ...]]] = {}
        for chunk in packed.moving.values():
            key = (chunk.group, chunk.num_elements)
            if key not in kinds:
                kinds[key] = prices.cost(chunk)
        self._costs = {
            index: kinds[chunk.group, chunk.num_elements][0]
            for index, chunk in packed.moving.items()
        }
        self._resident = prices.resident(packed.resident)
        self._known: dict[int, ChunkTime] = {}
        self.trust = trust_of_all([one for _, found in kinds.values() for one in found])

    def time(self, num_places: int) -> ChunkTime:
        """Return the time with so many places."""
        if num_places not in self._known:
            self._known[num_places] = simulate(
                self._order,
                replay(self._order, num_places=num_places),
                costs=self._costs,
                machine=self._machine,
                resident=self._resident,
            )
        return self._known[num_places]


def _smallest_as_fast(trial: _Trial, fewest: int, most: int) -> int:
    """Return the fewest places whose micro-batch is as short as with the most of them.

    More places never need more transfers, so that bisection finds them.
    """
    goal = (1 + CACHE_TOLERANCE) * trial.time(most).step_seconds(1)
    low, high = fewest, most
    while low < high:
        middle = (low + high) // 2
        if trial.time(middle).step_seconds(1) <= goal:
            high = middle
        else:
            low = middle + 1
    return high
