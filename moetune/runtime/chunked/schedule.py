"""Which chunks a recorded step will fetch, and from when on each can be fetched ahead."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moetune.domain.chunk_order import Use

_LAG = 2
"""A chunk that leaves after a use is still on its way during the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """One chunk that has to come.

    Args:
        position: of the use that needs it.
        ready: first position at whose beginning there is room for it.
        victim: the chunk that makes room; None where there is some.
    """

    position: int
    ready: int
    chunk: int
    victim: int | None


class NextUses:
    """When every chunk of a repeated order is used next."""

    def __init__(self, order: Sequence[Use]) -> None:
        self._length = len(order)
        self._positions: dict[int, list[int]] = {}
        for position, use in enumerate(order):
            for chunk in use.chunks:
                self._positions.setdefault(chunk, []).append(position)

    def after(self, chunk: int, position: int) -> int:
        """Return the next use after `position`, in the next step where this one has none."""
        positions = self._positions.get(chunk)
        if not positions:
            return 2 * self._length
        index = bisect_right(positions, position)
        return positions[index] if index < len(positions) else positions[0] + self._length

    def farthest(self, chunks: Iterable[int], position: int) -> int:
        """Return the chunk to evict (Belady): used last; of equals the one that packs first."""
        return max(chunks, key=lambda chunk: (self.after(chunk, position), -chunk))


def plan_fetches(order: Sequence[Use], places: int, resident: Iterable[int]) -> tuple[Fetch, ...]:
    """Return the fetches of one step under Belady's policy, in their order.

    Args:
        order: the step's uses; none has more chunks than there are places.
        places: of the cache.
        resident: chunks in the cache before the step.
    """
    uses = NextUses(order)
    cached = dict.fromkeys(resident, -1)
    room = [0] * (places - len(cached))
    gone: dict[int, int] = {}
    fetches: list[Fetch] = []
    ready = 0
    for position, use in enumerate(order):
        for chunk in use.chunks:
            if chunk in cached:
                continue
            victim = None
            if room:
                free = room.pop(0)
            else:
                victim = uses.farthest(cached.keys() - set(use.chunks), position)
                free = cached.pop(victim) + 1
            ready = min(max(ready, free, gone.get(chunk, 0)), position)
            fetches.append(Fetch(position=position, ready=ready, chunk=chunk, victim=victim))
            cached[chunk] = position
        cached.update(dict.fromkeys(use.chunks, position))
        for chunk in use.leaves:
            if chunk in cached:
                del cached[chunk]
                gone[chunk] = position + _LAG
                room.append(position + _LAG)
    return tuple(fetches)
