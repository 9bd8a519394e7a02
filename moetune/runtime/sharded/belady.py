"""Belady's cache of chunks: fetches and evictions of a training step.

Eviction is Belady's: of the chunks that the use at hand does not need, the one whose next use is
farthest. Steps repeat, so the next step's uses follow the last one. A chunk that is reduced leaves
the cache, and has to be gathered again for its next use whatever the policy.

An eviction is decided when a place is needed. The fetch itself may begin as soon as that place is
free: a prefetch so early costs no transfers.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moetune.domain.chunks import Use

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
