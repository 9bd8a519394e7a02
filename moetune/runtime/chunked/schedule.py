"""From when on each chunk of a recorded step can be fetched ahead."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from moetune.domain.chunk_order import Use
from moetune.solve.chunk_cache import AT_START, NextUses, gathers_of_step

_LAG = 2
"""A chunk that leaves after a use is still on its way during the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """One chunk that has to come.

    Args:
        position: of the use that needs it.
        ready: first position at whose beginning there is room for it; `AT_START` before all.
        victim: the chunk that makes room; None where there is some.
    """

    position: int
    ready: int
    chunk: int
    victim: int | None


def plan_fetches(order: Sequence[Use], places: int, resident: Iterable[int]) -> tuple[Fetch, ...]:
    """Return the fetches of one step under Belady's policy, in their order.

    Args:
        order: the step's uses; none has more chunks than there are places.
        places: of the cache.
        resident: chunks in the cache before the step.
    """
    gathers, _ = gathers_of_step(order, NextUses(order), places, resident)
    fetches: list[Fetch] = []
    ready, position = AT_START, 0
    gone: dict[int, int] = {}
    for one in gathers:
        for passed in range(position, one.use):
            gone.update(dict.fromkeys(order[passed].leaves, passed + _LAG))
        position = one.use
        room = one.free_after
        if room != AT_START:
            room += _LAG if one.was_reduced else 1
        ready = min(max(ready, room, gone.get(one.chunk, AT_START)), position)
        fetches.append(Fetch(position=position, ready=ready, chunk=one.chunk, victim=one.evicted))
    return tuple(fetches)
