"""The cache of whole chunks on the device (Elixir's rCache): fetch, reduce and evict.

The first step records the order in which chunks are used (Elixir §4). Steps that repeat it fetch
ahead by Belady's policy: of the chunks that the use at hand does not need, the one leaves whose
next use is farthest. A chunk that is reduced leaves the cache whatever the policy. An eviction is
decided when a place is needed; the fetch itself may begin as soon as that place is free, which
costs no transfers. `ModelChunks` calls the cache for every use of a chunk.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from moetune.domain.chunks import Use
from moetune.domain.errors import InputError
from moetune.runtime.sharded.stored import StoredChunk

AT_START = -1
"""Stands for a time before the step's first use."""
_LAG = 2
"""Uses until a reduced chunk has left the cache: its reduction runs during the next use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """One planned fetch of a chunk.

    Args:
        position: of the use that needs it.
        ready: first position at whose beginning the cache has space for it; `AT_START` before all.
        victim: the chunk to evict for it, None if there is space.
    """

    position: int
    ready: int
    chunk: int
    victim: int | None


class NextUses:
    """Next uses of every chunk in an order that repeats."""

    def __init__(self, order: Sequence[Use]) -> None:
        self._length = len(order)
        self._positions: dict[int, list[int]] = {}
        for position, use in enumerate(order):
            for chunk in dict.fromkeys(use.chunks):
                self._positions.setdefault(chunk, []).append(position)

    def after(self, chunk: int, position: int) -> int:
        """Return the next use after `position`, in the next step where this one has none."""
        positions = self._positions.get(chunk)
        if not positions:
            return 2 * self._length
        index = bisect_right(positions, position)
        return positions[index] if index < len(positions) else positions[0] + self._length

    def farthest(self, chunks: Iterable[int], position: int) -> int:
        """Return the chunk to evict (Belady): farthest next use, then lowest index."""
        return max(chunks, key=lambda chunk: (self.after(chunk, position), -chunk))


def fetches_of_step(
    order: Sequence[Use], uses: NextUses, capacity: int, resident: Iterable[int]
) -> tuple[tuple[Fetch, ...], frozenset[int]]:
    """Return the fetches of one step in their order, and the chunks in the cache after it.

    Args:
        order: the step's uses; none has more chunks than the capacity.
        uses: of the order.
        capacity: whole chunks that the cache holds.
        resident: chunks in the cache before the step.
    """
    last_use = dict.fromkeys(resident, AT_START)
    free, gone = [AT_START] * (capacity - len(last_use)), dict[int, int]()
    ready, fetches = AT_START, list[Fetch]()
    for position, use in enumerate(order):
        for chunk in dict.fromkeys(use.chunks):
            if chunk not in last_use:
                victim = None
                if not free:
                    victim = uses.farthest(last_use.keys() - set(use.chunks), position)
                    last = last_use.pop(victim)
                    free.append(last if last == AT_START else last + 1)
                ready = min(max(ready, free.pop(0), gone.get(chunk, AT_START)), position)
                fetches.append(Fetch(position=position, ready=ready, chunk=chunk, victim=victim))
            last_use[chunk] = position
        for chunk in use.leaves:
            gone[chunk] = position + _LAG
            if last_use.pop(chunk, None) is not None:
                free.append(gone[chunk])
    return tuple(fetches), frozenset(last_use)


class AccessTrace:
    """The chunk uses of training steps, or of evaluation steps.

    Attributes:
        known: uses of the last whole step, empty before there is one.
        repeats: this step's uses so far are the known step's.
    """

    def __init__(self) -> None:
        self.known: tuple[Use, ...] = ()
        self.repeats = False
        self._now: list[Use] = []
        self._next_uses = NextUses(())
        self._plans: dict[frozenset[int], tuple[Fetch, ...]] = {}

    @property
    def position(self) -> int:
        """Index of the current use in this step."""
        return len(self._now) - 1

    def begin(self) -> None:
        """End this step and begin the next."""
        found = tuple(self._now)
        if found and found != self.known:
            self.known, self._next_uses = found, NextUses(found)
            self._plans.clear()
        self._now = []
        self.repeats = bool(self.known)

    def note(self, chunks: tuple[int, ...]) -> None:
        """Record a use."""
        position = len(self._now)
        if self.repeats and (position >= len(self.known) or self.known[position].chunks != chunks):
            self.repeats = False
        self._now.append(Use(chunks=chunks))

    def fetches(self, capacity: int, resident: Collection[int]) -> tuple[Fetch, ...]:
        """Return the fetches of a step that repeats the known one, see `fetches_of_step`."""
        key = frozenset(resident)
        if key not in self._plans:
            self._plans[key], _ = fetches_of_step(self.known, self._next_uses, capacity, resident)
        return self._plans[key]

    def farthest(self, chunks: Sequence[int]) -> int:
        """Return the chunk whose next use is farthest away in the known step."""
        return self._next_uses.farthest(chunks, self.position)

    def note_eviction(self, chunk: int) -> None:
        """Record that a chunk was reduced and evicted after the current use."""
        if self._now:
            last = self._now[-1]
            self._now[-1] = replace(last, leaves=(*last.leaves, chunk))


class Cache:
    """Fetches chunks before they are used, and chooses the victims of eviction.

    Decisions follow from the order of uses alone, never from timing, so that all ranks issue
    the same transfers. In a step of unknown order the victim is the oldest; in one that repeats
    the last, it is the chunk whose next use is farthest away (Belady).

    Args:
        chunks: all chunks of the model. Fused ones take no place: they come with their first use
            in a step, and leave when they are reduced.
        capacity: whole chunks that it may hold.

    Attributes:
        digest: of all transfers so far, equal on all ranks.
    """

    def __init__(self, chunks: Sequence[StoredChunk], capacity: int) -> None:
        self._chunks, self.capacity = chunks, capacity
        self._inside: dict[int, None] = {}
        self._reducing: deque[StoredChunk] = deque()
        self._traces = {True: AccessTrace(), False: AccessTrace()}
        self._trains = True
        self._fetches: deque[Fetch] = deque()
        self.digest = 0

    @property
    def order(self) -> tuple[Use, ...]:
        """The uses of the last whole training step."""
        return self._traces[True].known

    def begin_step(self, *, trains: bool) -> None:
        """Begin a step, expected to repeat the last of its kind (training or evaluation)."""
        self._trains = trains
        trace = self._traces[trains]
        trace.begin()
        self._fetches.clear()
        if trace.repeats:
            while self._reducing:
                self._finish_reduction()
            self._fetches.extend(trace.fetches(self.capacity, self._inside))
            self._fetch_ahead(AT_START)

    def use(self, numbers: Iterable[int], names: frozenset[str], label: str) -> None:
        """Fetch the chunks of a module, and begin to fetch the next ones.

        Args:
            names: of the parameters that the module reads.
            label: of the module, for the error.

        Raises:
            InputError: they do not fit together with the chunks needed at the same time.
        """
        chunks = [self._chunks[number] for number in numbers]
        for chunk in chunks:
            self._restore_values(chunk, names)
            if chunk.chunk.is_fused and chunk.phase == "away":
                self._add_to_digest(0, chunk.number)
                chunk.start_gather()
        wanted = {chunk.number for chunk in chunks if not chunk.chunk.is_fused}
        busy = {n for n in self._inside if self._is_busy(self._chunks[n])} | wanted
        busy = self._fit(busy, wanted, label)
        trace = self._traces[self._trains]
        trace.note(tuple(sorted(busy)))
        if not trace.repeats:
            self._fetches.clear()
        for number in sorted(wanted - self._inside.keys()):
            self._make_space(busy)
            self._fetch(number)
        self._fetch_ahead(trace.position)
        for chunk in chunks:
            chunk.finish_gather()

    def allocate_for_gradients(self, chunk: StoredChunk) -> None:
        """Allocate a chunk's buffer for gradients alone, without fetching its values."""
        if not chunk.chunk.is_fused:
            busy = {n for n in self._inside if self._is_busy(self._chunks[n])}
            busy = self._fit(busy | {chunk.number}, {chunk.number}, chunk.names[0])
            self._make_space(busy)
            self._inside[chunk.number] = None
        chunk.allocate_for_gradients()

    def reduce(self, chunk: StoredChunk) -> None:
        """Begin to reduce a chunk's gradients over its ranks; it is evicted when that ends."""
        self._add_to_digest(1, chunk.number)
        chunk.start_reduce()
        self._reducing.append(chunk)
        if not chunk.chunk.is_fused:
            self._traces[self._trains].note_eviction(chunk.number)

    def finish_reduction(self) -> StoredChunk | None:
        """Wait for the oldest reduction and return its chunk, None where there is none."""
        return self._finish_reduction() if self._reducing else None

    def finish_reductions(self) -> None:
        """Wait for all reductions."""
        while self._reducing:
            self._finish_reduction()

    def evict(self, *, only_trainable: bool) -> None:
        """Evict chunks, because their shards have new values."""
        self.finish_reductions()
        for chunk in self._chunks:
            if chunk.phase == "away" or (only_trainable and not chunk.chunk.group.is_trainable):
                continue
            chunk.drop()
            if chunk.number in self._inside:
                del self._inside[chunk.number]
                self._traces[self._trains].note_eviction(chunk.number)

    def abandon_backward(self) -> None:
        """Discard the gradients of a backward pass that did not end."""
        self.finish_reductions()
        for chunk in self._chunks:
            chunk.discard_gradients()
            if chunk.phase == "away":
                self._inside.pop(chunk.number, None)

    def _is_busy(self, chunk: StoredChunk) -> bool:
        return chunk.num_readers > 0 or chunk.has_unreduced_gradients

    def _restore_values(self, chunk: StoredChunk, names: frozenset[str]) -> None:
        """Reduce a chunk's gradients early, if values that they overwrote are needed again."""
        if chunk.has_lost(names):
            if chunk.phase != "reducing":
                self.reduce(chunk)
            self.finish_reductions()

    def _fit(self, busy: set[int], wanted: set[int], label: str) -> set[int]:
        """Return the chunks that must be inside; if too many, reduce the oldest gradients first."""
        if len(busy) <= self.capacity:
            return busy
        for number in list(self._inside):
            chunk = self._chunks[number]
            may_leave = (
                chunk.has_unreduced_gradients and not chunk.num_readers and number not in wanted
            )
            if len(busy) > self.capacity and may_leave:
                self.reduce(chunk)
                busy = busy - {number}
        if len(busy) > self.capacity:
            raise InputError(
                f"{label} needs {len(wanted)} chunks, {len(busy)} together with the modules "
                f"around it, and the cache holds {self.capacity}",
                f"use a cache_bytes of at least {len(busy)} chunks",
            )
        return busy

    def _make_space(self, busy: set[int]) -> None:
        while len(self._inside) >= self.capacity:
            if any(not chunk.chunk.is_fused for chunk in self._reducing):
                self._finish_reduction()
                continue
            free = [number for number in self._inside if number not in busy]
            trace = self._traces[self._trains]
            self._evict(trace.farthest(free) if trace.repeats else free[0])

    def _fetch_ahead(self, position: int) -> None:
        """Begin the planned fetches of later uses for which there is space already."""
        while self._fetches and self._fetches[0].position <= position:
            self._fetches.popleft()
        while self._fetches and self._fetches[0].ready <= position:
            fetch = self._fetches[0]
            if fetch.chunk in self._inside:
                break
            if len(self._inside) >= self.capacity:
                if any(not chunk.chunk.is_fused for chunk in self._reducing):
                    self._finish_reduction()
                    continue
                victim = fetch.victim
                if victim not in self._inside or self._is_busy(self._chunks[victim]):
                    break
                self._evict(victim)
            self._fetch(fetch.chunk)
            self._fetches.popleft()

    def _add_to_digest(self, *what: int) -> None:
        """Add a transfer to the digest."""
        # Python salts hashes of texts in each process, those of numbers not.
        self.digest = hash((self.digest, *what)) % 2**62

    def _fetch(self, number: int) -> None:
        self._add_to_digest(0, number)
        self._inside[number] = None
        self._chunks[number].start_gather()

    def _evict(self, number: int) -> None:
        del self._inside[number]
        self._chunks[number].drop()

    def _finish_reduction(self) -> StoredChunk:
        chunk = self._reducing.popleft()
        chunk.finish_reduce()
        self._inside.pop(chunk.number, None)
        return chunk
