"""Belady cache of chunks: gathers and evictions of a training step, for planner and runtime alike.

Eviction is Belady's: of the chunks that the use at hand does not need, the one whose next use is
farthest. Steps repeat, so the next step's uses follow the last one. A chunk that is reduced leaves
the cache, and has to be gathered again for its next use whatever the policy.

An eviction is decided when a place is needed. The gather itself may begin as soon as that place is
free: a prefetch so early costs no transfers.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moetune.domain.chunks import Use

AT_START = -1
"""Stands for a time before the step's first use."""
FEWEST_PLACES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """The all-gather of one chunk into the cache.

    Args:
        use: index of the first use that needs it.
        evicted: the chunk whose place it takes; None for a free place.
        free_after: index of the use after which the place is free; `AT_START` before all.
        was_reduced: the place becomes free only when the chunk in it has been reduced.
    """

    chunk: int
    use: int
    evicted: int | None
    free_after: int
    was_reduced: bool = False


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


def gathers_of_step(
    order: Sequence[Use], uses: NextUses, num_places: int, resident: Iterable[int]
) -> tuple[tuple[Gather, ...], frozenset[int]]:
    """Return the gathers of one step, and the chunks that are in the cache after it.

    Args:
        uses: of the order.
        resident: chunks in the cache before the step.
    """
    last_use = dict.fromkeys(resident, AT_START)
    free = [(AT_START, False)] * (num_places - len(last_use))
    gathers = []
    for index, use in enumerate(order):
        for chunk in dict.fromkeys(use.chunks):
            if chunk not in last_use:
                evicted = None
                if not free:
                    evicted = uses.farthest(last_use.keys() - set(use.chunks), index)
                    free.append((last_use.pop(evicted), False))
                free_after, was_reduced = free.pop(0)
                gathers.append(
                    Gather(
                        chunk=chunk,
                        use=index,
                        evicted=evicted,
                        free_after=free_after,
                        was_reduced=was_reduced,
                    )
                )
            last_use[chunk] = index
        for chunk in use.leaves:
            if last_use.pop(chunk, None) is not None:
                free.append((index, True))
    return tuple(gathers), frozenset(last_use)
