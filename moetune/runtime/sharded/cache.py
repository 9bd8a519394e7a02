"""The replicated cache: whole chunks on the device, in a fixed number of places."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from moetune.domain.chunks import Use
from moetune.domain.errors import InputError
from moetune.runtime.sharded.schedule import Fetch, Record, plan_fetches
from moetune.runtime.sharded.stored import StoredChunk
from moetune.solve.chunks.cache import AT_START, NextUses

_SEED = 20221206


class Cache:
    """Brings chunks in before they are used, and decides which make room.

    What it decides follows from the order of uses alone, never from timing: all ranks issue
    the same transfers. In a step of unknown order a random chunk makes room; in one that
    repeats the last, the one whose next use is farthest (Belady).

    Args:
        chunks: all of the model; those that stay are none of its business.
        places: how many whole chunks it may hold.

    Attributes:
        digest: of all transfers so far, equal on all ranks.
        on_reduced: called with a chunk whose gradients are where this rank keeps them.
    """

    def __init__(self, chunks: Sequence[StoredChunk], places: int) -> None:
        self._chunks, self.places = chunks, places
        self._generator = torch.Generator().manual_seed(_SEED)
        self._inside: dict[int, None] = {}
        self._leaving: deque[StoredChunk] = deque()
        self._records = {True: Record(), False: Record()}
        self._uses: dict[bool, NextUses] = {}
        self._plans: dict[tuple[bool, frozenset[int]], tuple[Fetch, ...]] = {}
        self._trains = True
        self._fetches: deque[Fetch] = deque()
        self.digest = 0
        self.on_reduced: Callable[[StoredChunk], None] = lambda _: None

    @property
    def order(self) -> tuple[Use, ...]:
        """The uses of the last whole training step."""
        return self._records[True].known

    def adopt(self, chunks: Sequence[StoredChunk], places: int) -> None:
        """Hold other chunks from now on, whose order of uses is unknown."""
        self._chunks, self.places = chunks, places
        self._records = {True: Record(), False: Record()}
        self._uses.clear()
        self._plans.clear()
        self._fetches.clear()

    def begin_step(self, *, trains: bool) -> None:
        """Begin a step, which will repeat the last of its kind if all goes as before."""
        self._trains = trains
        record = self._records[trains]
        if record.begin():
            self._uses[trains] = NextUses(record.known)
            self._plans = {key: plan for key, plan in self._plans.items() if key[0] != trains}
        self._fetches.clear()
        if record.follows:
            while self._leaving:
                self._finish_leaving()
            key = trains, frozenset(self._inside)
            if key not in self._plans:
                self._plans[key] = plan_fetches(record.known, self.places, self._inside)
            self._fetches.extend(self._plans[key])
            self._fetch_ahead(AT_START)

    def use(self, numbers: Iterable[int], names: frozenset[str], who: str) -> None:
        """Bring the chunks of a module in, and begin to bring the next ones.

        Args:
            names: of the parameters that it reads.
            who: the module and its first parameter, for the error.

        Raises:
            InputError: they do not fit, beside what is needed at the same time.
        """
        wanted = {number for number in numbers if not self._chunks[number].stays}
        for number in wanted:
            self._give_back_values(self._chunks[number], names)
        busy = {n for n in self._inside if self._is_busy(self._chunks[n])} | wanted
        busy = self._within_places(busy, wanted, who)
        record = self._records[self._trains]
        record.note(tuple(sorted(busy)))
        if not record.follows:
            self._fetches.clear()
        for number in sorted(wanted - self._inside.keys()):
            self._make_room(busy)
            self._bring(number)
        self._fetch_ahead(record.position)
        for number in wanted:
            self._chunks[number].finish_gather()

    def make_blank(self, chunk: StoredChunk) -> None:
        """Make room for a chunk's gradients, where its values are not needed."""
        busy = {n for n in self._inside if self._is_busy(self._chunks[n])}
        busy = self._within_places(busy | {chunk.number}, {chunk.number}, chunk.names[0])
        self._make_room(busy)
        self._inside[chunk.number] = None
        chunk.make_blank()

    def reduce(self, chunk: StoredChunk) -> None:
        """Begin to add up a chunk's gradients; it leaves."""
        self._sign(1, chunk.number)
        chunk.start_reduce()
        self._leaving.append(chunk)
        if not chunk.stays:
            self._records[self._trains].note_leave(chunk.number)

    def settle_one(self) -> StoredChunk | None:
        """Wait for the chunk that leaves first, and return it."""
        return self._finish_leaving() if self._leaving else None

    def settle(self) -> None:
        """Wait for everything that leaves."""
        while self._leaving:
            self._finish_leaving()

    def evict(self, *, only_trainable: bool) -> None:
        """Let go of chunks whose shards have new values."""
        self.settle()
        for number in list(self._inside):
            if self._chunks[number].chunk.group.is_trainable or not only_trainable:
                self._drop(number)
                self._records[self._trains].note_leave(number)

    def forget(self) -> None:
        """Clear up after a backward pass that did not end."""
        self.settle()
        for chunk in self._chunks:
            chunk.forget()
            if chunk.phase == "away":
                self._inside.pop(chunk.number, None)

    def _is_busy(self, chunk: StoredChunk) -> bool:
        return chunk.holds > 0 or chunk.has_gradients

    def _give_back_values(self, chunk: StoredChunk, names: frozenset[str]) -> None:
        """Reduce what a chunk has of gradients, because values in their slots are needed again."""
        if chunk.has_lost(names):
            if chunk.phase != "reducing":
                self.reduce(chunk)
            self.settle()

    def _within_places(self, busy: set[int], wanted: set[int], who: str) -> set[int]:
        """Return the chunks that must be inside; the oldest gradients leave where too many."""
        if len(busy) <= self.places:
            return busy
        for number in list(self._inside):
            chunk = self._chunks[number]
            may_leave = chunk.has_gradients and not chunk.holds and number not in wanted
            if len(busy) > self.places and may_leave:
                self.reduce(chunk)
                busy = busy - {number}
        if len(busy) > self.places:
            raise InputError(
                f"{who} needs {len(wanted)} chunks, {len(busy)} together with the modules "
                f"around it, and the cache has {self.places} places",
                f"use a cache_bytes of at least {len(busy)} chunks",
            )
        return busy

    def _make_room(self, busy: set[int]) -> None:
        while len(self._inside) >= self.places:
            if any(not chunk.stays for chunk in self._leaving):
                self._finish_leaving()
                continue
            free = sorted(number for number in self._inside if number not in busy)
            record = self._records[self._trains]
            if record.follows:
                self._drop(self._uses[self._trains].farthest(free, record.position))
            else:
                choice = torch.randint(len(free), (1,), generator=self._generator)
                self._drop(free[int(choice)])

    def _fetch_ahead(self, position: int) -> None:
        """Begin the fetches of later uses for which there is room already."""
        while self._fetches and self._fetches[0].position <= position:
            self._fetches.popleft()
        while self._fetches and self._fetches[0].ready <= position:
            fetch = self._fetches[0]
            if fetch.chunk in self._inside:
                break
            if len(self._inside) >= self.places:
                if any(not chunk.stays for chunk in self._leaving):
                    self._finish_leaving()
                    continue
                victim = fetch.victim
                if victim not in self._inside or self._is_busy(self._chunks[victim]):
                    break
                self._drop(victim)
            self._bring(fetch.chunk)
            self._fetches.popleft()

    def _sign(self, *what: int) -> None:
        """Let the digest of all transfers know of one more."""
        self.digest = hash((self.digest, *what)) % 2**62

    def _bring(self, number: int) -> None:
        self._sign(0, number)
        self._inside[number] = None
        self._chunks[number].start_gather()

    def _drop(self, number: int) -> None:
        del self._inside[number]
        self._chunks[number].drop()

    def _finish_leaving(self) -> StoredChunk:
        chunk = self._leaving.popleft()
        chunk.finish_reduce()
        if not chunk.stays:
            self._inside.pop(chunk.number, None)
        self.on_reduced(chunk)
        return chunk
