"""The cache of gathered chunks (Elixir's rCache): fetch, evict, and look ahead.

The first step records the order in which chunks are used (Elixir §4). Steps that repeat the order
fetch ahead by Belady's policy: among chunks that the present use does not need, it evicts the chunk
whose next use is farthest. A chunk whose gradients are reduced always leaves the cache, because
FSDP2 frees it. Decisions follow only from the order of uses, never from timing, so that all ranks
issue the same transfers.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch.distributed.fsdp import FSDPModule, UnshardHandle, fully_shard

from moetune.domain.chunks import Use
from moetune.domain.errors import InputError
from moetune.domain.units import format_bytes
from moetune.runtime.sharded.units import Unit

AT_START = -1
"""A position before the step's first use."""
_MOST_USES = 2**16
"""The most uses that a step records: passes may come without a following optimizer step."""


class NextUses:
    """The next uses of each chunk in an order that repeats."""

    def __init__(self, order: Sequence[Use]) -> None:
        self._length = len(order)
        self._positions: dict[int, list[int]] = {}
        self._leaves: dict[int, list[int]] = {}
        for position, use in enumerate(order):
            for chunk in dict.fromkeys(use.chunks):
                self._positions.setdefault(chunk, []).append(position)
            for chunk in use.leaves:
                self._leaves.setdefault(chunk, []).append(position)

    def leaves(self, chunk: int, between: range) -> bool:
        """Return whether FSDP2 frees the chunk after any use in `between`."""
        return any(position in between for position in self._leaves.get(chunk, ()))

    def after(self, chunk: int, position: int) -> int:
        """Return the next use after `position`, in the next step if this step has no more use."""
        positions = self._positions.get(chunk)
        if not positions:
            return 2 * self._length
        index = bisect_right(positions, position)
        return positions[index] if index < len(positions) else positions[0] + self._length

    def farthest(self, chunks: Iterable[int], position: int) -> int:
        """Return the chunk to evict (Belady): farthest next use, the lowest index if they tie."""
        return max(chunks, key=lambda chunk: (self.after(chunk, position), -chunk))


@dataclass(slots=True, kw_only=True)
class GatheredChunk:
    """Modules whose parameters FSDP2 gathers together, and frees when the cache says so.

    Args:
        num_running: calls of the modules under way.
        is_open: the chunk's backward pass is under way; FSDP2 frees the chunk at its end.
    """

    number: int
    units: tuple[Unit, ...]
    num_running: int = 0
    is_open: bool = False
    num_bytes: int = field(init=False)
    _gathering: UnshardHandle | None = None

    def __post_init__(self) -> None:
        self.num_bytes = sum(unit.num_bytes for unit in self.units)

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names in the model."""
        return tuple(name for unit in self.units for name in unit.parameters)

    @property
    def _module(self) -> FSDPModule:
        module = self.units[0].module
        assert isinstance(module, FSDPModule)  # noqa: S101 - once it is sharded
        return module

    def take_over(self) -> None:
        """Stop FSDP2 from freeing after a forward pass and prefetching, which the cache does."""
        self._module.set_reshard_after_forward(reshard_after_forward=False, recurse=False)
        self._module.set_modules_to_backward_prefetch([self._module])

    @property
    def is_freed(self) -> bool:
        """Whether no parameter of the chunk is gathered or being gathered."""
        group = fully_shard.state(self._module)._fsdp_param_group  # type: ignore[attr-defined] # noqa: SLF001 - FSDP2 has no public name for it
        return bool(group.is_sharded and group._all_gather_result is None)  # noqa: SLF001

    def gather(self) -> None:
        """Start gathering the chunk."""
        self._gathering = self._module.unshard(async_op=True)

    def finish(self) -> None:
        """Wait until the chunk is gathered: FSDP2 does not wait if its modules run again."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def free(self) -> None:
        """Free the chunk, even during a pass through some of its modules."""
        self.finish()
        self._module.set_reshard_after_forward(reshard_after_forward=True, recurse=False)
        self._module.reshard()
        self._module.set_reshard_after_forward(reshard_after_forward=False, recurse=False)


@dataclass(slots=True, repr=False)
class Cache:
    """The cache that fetches chunks before their use, and chooses the victims of eviction.

    In a step of unknown order the victim is the oldest chunk. In a step that repeats the last
    training step, it is the chunk whose next use is farthest away (Belady).

    Args:
        chunks: all chunks that the cache gathers and frees.
        capacity: number of chunks that the cache may hold.

    Attributes:
        order: uses of the last whole training step; empty before the first.
        digest: digest of all gathers so far, equal on all ranks.
        num_gathers: gathers since the model was sharded.
        peak_bytes: most bytes of gathered chunks at the same time.
    """

    chunks: Sequence[GatheredChunk]
    capacity: int
    order: tuple[Use, ...] = ()
    digest: int = 0
    num_gathers: int = 0
    peak_bytes: int = 0
    _inside: dict[int, None] = field(default_factory=dict)
    _now: list[Use] = field(default_factory=list)
    _repeats: bool = False
    _uses: NextUses = field(init=False)
    _ahead: int = 0
    """The first use whose chunks were not all gathered ahead."""

    def __post_init__(self) -> None:
        self._uses = NextUses(self.order)

    def __repr__(self) -> str:
        return (
            f"{len(self.chunks)} chunks, cache of {self.capacity}; {self.num_gathers} gathered, "
            f"at most {format_bytes(self.peak_bytes)} at once"
        )

    def begin_step(self) -> None:
        """End a training step, and begin the next, which is expected to repeat the order."""
        self._note_freed()
        order = tuple(self._now)
        if order and order != self.order:
            self.order, self._uses = order, NextUses(order)
        self._now, self._ahead, self._repeats = [], 0, bool(self.order)
        self._fetch_ahead(AT_START)

    def use(self, chunk: GatheredChunk, label: str, *, is_training: bool) -> None:
        """Gather a module's chunk if the cache lacks it, and start to gather the next chunks.

        Args:
            label: names the module, for the error.

        Raises:
            InputError: the chunk does not fit together with the chunks of the modules around it.
        """
        self._note_freed()
        busy = {item.number for item in self.chunks if item.num_running} | {chunk.number}
        if len(busy) > self.capacity:
            raise InputError(
                f"{label} and the modules around it need {len(busy)} chunks at once, and the "
                f"cache holds {self.capacity}",
                f"use a cache_bytes of at least {len(busy)} chunks",
            )
        if is_training:
            self._note(tuple(sorted(busy)))
        else:
            self._repeats = False
        if chunk.number not in self._inside:
            self._make_space(busy)
            self._fetch(chunk)
        self._fetch_ahead(len(self._now) - 1)
        chunk.finish()

    def evict(self) -> None:
        """Free all chunks, because their shards have new values."""
        self._note_freed()
        for number in self._inside:
            self.chunks[number].free()
        self._note_freed()

    def _note(self, chunks: tuple[int, ...]) -> None:
        """Record a use, unless it equals the previous use."""
        if self._now and self._now[-1].chunks == chunks and not self._now[-1].leaves:
            return
        position = len(self._now)
        if position == _MOST_USES:
            self._repeats = False
            return
        is_known = position < len(self.order) and self.order[position].chunks == chunks
        self._repeats = self._repeats and is_known
        self._now.append(Use(chunks=chunks))

    def _note_freed(self) -> None:
        """Record which chunks FSDP2 has freed, because their gradients are complete."""
        gone = tuple(number for number in self._inside if self.chunks[number].is_freed)
        for number in gone:
            del self._inside[number]
            self.chunks[number].is_open = False
        if gone and self._now:
            last = self._now[-1]
            self._now[-1] = replace(last, leaves=(*last.leaves, *gone))

    def _make_space(self, busy: Collection[int]) -> None:
        """Evict until there is space for a chunk; chunks whose backward pass is open stay."""
        while len(self._inside) >= self.capacity:
            free = [
                number
                for number in self._inside
                if number not in busy and not self.chunks[number].is_open
            ]
            if not free:
                return
            self._evict(self._uses.farthest(free, len(self._now) - 1) if self._repeats else free[0])

    def _fetch_ahead(self, position: int) -> None:
        """Gather for the uses after a position, as early as Belady's choice of victims allows."""
        self._ahead = max(self._ahead, position + 1)
        while self._repeats and self._ahead < len(self.order):
            for number in self.order[self._ahead].chunks:
                if number not in self._inside:
                    if not self._has_space_ahead(position):
                        return
                    self._fetch(self.chunks[number])
            self._ahead += 1

    def _has_space_ahead(self, position: int) -> bool:
        """Return whether there is space for the next use, and evict a victim for it if needed.

        The victim must have no earlier use, and no other chunk may be about to leave by itself.
        """
        if len(self._inside) < self.capacity:
            return True
        coming, later = range(max(position, 0), self._ahead), self._ahead
        if any(self._uses.leaves(number, coming) for number in self._inside):
            return False
        needed = set(self.order[later].chunks)
        victim = self._uses.farthest(self._inside.keys() - needed, later)
        is_busy = self.chunks[victim].num_running or self.chunks[victim].is_open
        is_now = position != AT_START and victim in self._now[position].chunks
        if is_busy or is_now or self._uses.after(victim, position) < later:
            return False
        self._evict(victim)
        return True

    def _fetch(self, chunk: GatheredChunk) -> None:
        # Python salts hashes of texts in each process, but not hashes of numbers.
        self.digest = hash((self.digest, chunk.number)) % 2**62
        self.num_gathers += 1
        self._inside[chunk.number] = None
        inside = sum(self.chunks[number].num_bytes for number in self._inside)
        self.peak_bytes = max(self.peak_bytes, inside)
        chunk.gather()

    def _evict(self, number: int) -> None:
        del self._inside[number]
        self.chunks[number].free()
