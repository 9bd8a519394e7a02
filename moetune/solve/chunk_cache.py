"""Which chunks a step gathers and which it gives up for them, in a cache of so many places.

Eviction is Belady's: of the chunks that the use at hand does not need, the one whose next use is
farthest. Steps repeat, so the next step's uses follow the last one. A chunk that leaves (it is
reduced) frees its place, and has to be gathered again for its next use whatever the policy.

Who is evicted is decided when a place is needed. The gather itself may begin as soon as its
place is free, which is how far ahead it can be fetched at no cost in transfers.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moetune.domain.chunk_order import Use
from moetune.domain.errors import InputError

AT_START = -1
"""The place of a gather is free before the step's first use."""
FEWEST_PLACES = 2
_MOST_STEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """A chunk that is made whole in the cache.

    Args:
        use: the first one that needs it there.
        evicted: the chunk whose place it takes; None for a free one.
        free_after: the use after which the place is free, `AT_START` before all.
        was_reduced: the place becomes free when the chunk that left it there is reduced.
    """

    chunk: int
    use: int
    evicted: int | None
    free_after: int
    was_reduced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The steps of one period of a steady state, mostly a single one.

    Args:
        steps: the gathers of each step, in the order in which they are needed.
    """

    steps: tuple[tuple[Gather, ...], ...]

    @property
    def num_gathers(self) -> float:
        """Gathers of a step, on average."""
        return sum(map(len, self.steps)) / len(self.steps)


def fewest_places(order: Sequence[Use]) -> int:
    """Return the places without which a use has no room; two at least."""
    return max(FEWEST_PLACES, *(len(set(use.chunks)) for use in order), 0)


def replay(order: Sequence[Use], *, num_places: int) -> Replay:
    """Return what a step gathers once every step does the same as one before.

    Raises:
        InputError: a use needs more chunks than the cache has places, or there are fewer than 2.
    """
    needed = fewest_places(order)
    if num_places < needed:
        raise InputError(
            f"a cache of {num_places} chunks is too small: the order needs {needed}",
            f"use a cache of at least {needed} chunks",
        )
    cache = _Cache(order, num_places)
    seen: dict[frozenset[int], int] = {}
    steps: list[tuple[Gather, ...]] = []
    while cache.resident not in seen and len(steps) < _MOST_STEPS:
        seen[cache.resident] = len(steps)
        steps.append(cache.step())
    return Replay(steps=tuple(steps[seen.get(cache.resident, -1) :]))


class _Cache:
    """The places while one step after the other goes by."""

    def __init__(self, order: Sequence[Use], num_places: int) -> None:
        self._order = order
        self._uses = _uses_of(order)
        self._num_places = num_places
        self._last_use: dict[int, int] = {}
        self._free: list[tuple[int, bool]] = []

    @property
    def resident(self) -> frozenset[int]:
        """Chunks in the cache."""
        return frozenset(self._last_use)

    def step(self) -> tuple[Gather, ...]:
        """Run one step and return its gathers."""
        self._last_use = dict.fromkeys(self._last_use, AT_START)
        self._free = [(AT_START, False)] * (self._num_places - len(self._last_use))
        gathers = []
        for index, use in enumerate(self._order):
            for chunk in dict.fromkeys(use.chunks):
                if chunk not in self._last_use:
                    gathers.append(self._gather(chunk, index, use))
                self._last_use[chunk] = index
            for chunk in use.leaves:
                if self._last_use.pop(chunk, None) is not None:
                    self._free.append((index, True))
        return tuple(gathers)

    def _gather(self, chunk: int, index: int, use: Use) -> Gather:
        if self._free:
            free_after, was_reduced = self._free.pop(0)
            return Gather(
                chunk=chunk, use=index, evicted=None, free_after=free_after, was_reduced=was_reduced
            )
        others = [one for one in self._last_use if one not in use.chunks]
        victim = max(others, key=lambda one: (self._next_use(one, index), one))
        free_after = self._last_use.pop(victim)
        return Gather(chunk=chunk, use=index, evicted=victim, free_after=free_after)

    def _next_use(self, chunk: int, index: int) -> int:
        uses = self._uses[chunk]
        place = bisect_right(uses, index)
        return uses[place] if place < len(uses) else uses[0] + len(self._order)


def _uses_of(order: Sequence[Use]) -> Mapping[int, Sequence[int]]:
    uses: dict[int, list[int]] = {}
    for index, use in enumerate(order):
        for chunk in dict.fromkeys(use.chunks):
            uses.setdefault(chunk, []).append(index)
    return uses
