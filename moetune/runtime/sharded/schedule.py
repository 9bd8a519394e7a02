"""The recorded order of a step's uses: kept while steps repeat it, recorded anew where not."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from moetune.domain.chunks import Use
from moetune.solve.chunks.cache import AT_START, NextUses, gathers_of_step


class Record:
    """What one kind of step uses, one after another.

    Attributes:
        known: the last whole step, empty before there is one.
        position: of the use at hand, in the step at hand.
        follows: whether all uses of this step were those of the known one.
    """

    def __init__(self) -> None:
        self.known: tuple[Use, ...] = ()
        self._now: list[Use] = []
        self.follows = False

    @property
    def position(self) -> int:
        """Return the place of the use at hand."""
        return len(self._now) - 1

    def begin(self) -> bool:
        """End the step at hand, begin one, and return whether the known order changed."""
        changed = False
        if self._now:
            found = tuple(self._now)
            changed = found != self.known
            self.known = found
        self._now = []
        self.follows = bool(self.known)
        return changed

    def note(self, chunks: tuple[int, ...]) -> None:
        """Write down a use."""
        position = len(self._now)
        if self.follows and (position >= len(self.known) or self.known[position].chunks != chunks):
            self.follows = False
        self._now.append(Use(chunks=chunks))

    def note_leave(self, chunk: int) -> None:
        """Write down that a chunk left after the use at hand."""
        if self._now:
            last = self._now[-1]
            self._now[-1] = replace(last, leaves=(*last.leaves, chunk))


@dataclass(frozen=True, slots=True)
class Uses:
    """How a model used its parameters.

    Args:
        order: parameters, by their first use.
        together: those that were needed at the same time.
    """

    order: tuple[str, ...]
    together: frozenset[frozenset[str]]


class FirstUses:
    """Writes down how a model uses its parameters, until it is closed."""

    def __init__(self) -> None:
        self._order: dict[str, None] = {}
        self._together: set[frozenset[str]] = set()
        self.is_open = True

    def note(self, names: Iterable[str]) -> None:
        """Write down that parameters are read."""
        if self.is_open:
            self._order.update(dict.fromkeys(names))

    def note_together(self, sets: Iterable[frozenset[str]]) -> None:
        """Write down that sets of parameters are needed at the same time."""
        if self.is_open:
            self._together.add(frozenset().union(*sets))

    def close(self) -> Uses:
        """Return what was written down; there will be no more."""
        self.is_open = False
        return Uses(tuple(self._order), frozenset(self._together))


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
