"""The recorded order of a step's chunk uses, and the fetches planned from it (Elixir §4).

The `cache` records every use here, and follows the plan in steps that repeat the last one.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from moetune.domain.chunks import Use
from moetune.solve.chunks.cache import AT_START, NextUses, gathers_of_step

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


def plan_fetches(order: Sequence[Use], capacity: int, resident: Iterable[int]) -> tuple[Fetch, ...]:
    """Return the fetches of one step under Belady's policy, in their order.

    Args:
        order: the step's uses; none has more chunks than the capacity.
        capacity: whole chunks that the cache holds.
        resident: chunks in the cache before the step.
    """
    gathers, _ = gathers_of_step(order, NextUses(order), capacity, resident)
    fetches: list[Fetch] = []
    ready, position = AT_START, 0
    gone: dict[int, int] = {}
    for one in gathers:
        for passed in range(position, one.use):
            gone.update(dict.fromkeys(order[passed].leaves, passed + _LAG))
        position = one.use
        free = one.free_after
        if free != AT_START:
            free += _LAG if one.was_reduced else 1
        ready = min(max(ready, free, gone.get(one.chunk, AT_START)), position)
        fetches.append(Fetch(position=position, ready=ready, chunk=one.chunk, victim=one.evicted))
    return tuple(fetches)


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
        """Return the fetches of a step that repeats the known one, see `plan_fetches`."""
        key = frozenset(resident)
        if key not in self._plans:
            self._plans[key] = plan_fetches(self.known, capacity, resident)
        return self._plans[key]

    def farthest(self, chunks: Sequence[int]) -> int:
        """Return the chunk whose next use is farthest away in the known step."""
        return self._next_uses.farthest(chunks, self.position)

    def note_eviction(self, chunk: int) -> None:
        """Record that a chunk was reduced and evicted after the current use."""
        if self._now:
            last = self._now[-1]
            self._now[-1] = replace(last, leaves=(*last.leaves, chunk))
