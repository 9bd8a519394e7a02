"""Passes of all ranks of a schedule in one order, in which each comes after its input.

What a pass waits for does not depend on how long the others take, so that it is found once for all
pipelines of a schedule.
"""

from functools import lru_cache
from typing import NamedTuple

from moetune.domain.pipeline import Schedule, rank_of_stage
from moetune.solve.training.schedule import PASS_WORDS, Action, Order, orders

_KINDS = tuple(PASS_WORDS)
_AT_ONCE, _NOWHERE = -2, -1


class Turn(NamedTuple):
    """A pass, with its places in tables of times.

    Args:
        length: of what each kind of pass takes, stage by stage (`Timetable.lengths`).
        needs, gives: of the messages: its input, and what comes of it.
        link: of the ways between ranks; None where what comes of it stays.
    """

    rank: int
    length: int
    batch: int
    needs: int
    gives: int
    link: int | None


class Timetable(NamedTuple):
    """The passes, and how many messages and ways between ranks there are."""

    turns: tuple[Turn, ...]
    num_stages: int
    num_messages: int
    num_links: int

    def action(self, turn: Turn) -> Action:
        """Return what a rank does in its turn."""
        kind, stage = divmod(turn.length, self.num_stages)
        return Action(_KINDS[kind], stage, turn.batch)


@lru_cache(maxsize=32)
def timetable(schedule: Schedule, pp: int, vpp: int, num_micro_batches: int) -> Timetable:
    """Return the passes of so many micro-batches."""
    every = orders(schedule, pp, vpp, num_micro_batches)
    ranks = tuple(rank_of_stage(stage, pp, schedule) for stage in range(pp * vpp))
    made = _Turns(every, ranks, num_micro_batches)
    waiting = [*range(pp)]
    while waiting:
        waiting += made.advance(waiting.pop())
    assert made.done == [*map(len, every)], "ranks wait for each other"  # noqa: S101 - our orders
    return Timetable(
        turns=tuple(made.turns), num_stages=pp * vpp, num_messages=len(made.places),
        num_links=len(made.links),
    )  # fmt: skip


class _Turns:
    """Passes that have had their turn, and the messages that these have left.

    The inputs of all stages have the first places, their gradients the next ones; the last two are
    of what is there at once, and of what nothing needs.
    """

    def __init__(self, every: tuple[Order, ...], ranks: tuple[int, ...], num: int) -> None:
        self.every, self.ranks, self.num_stages, self.num = every, ranks, len(ranks), num
        self.places = [*range(2 * self.num_stages * num + 2)]
        self.is_there = [False] * len(self.places)
        self.is_there[:num] = [True] * num  # of the first stage
        self.is_there[_AT_ONCE] = True
        self.done = [0] * len(every)
        self.links: dict[tuple[int, int], int] = {}
        self.turns: list[Turn] = []

    def advance(self, rank: int) -> set[int]:
        """Do a rank's passes until one lacks its input; return the ranks that have got some."""
        reached = set()
        for action in self.every[rank][self.done[rank] :]:
            needs, gives, there = self._messages(action)
            if not self.is_there[needs]:
                break
            link = None
            if there is not None and there != rank:
                link = self.links.setdefault((rank, there), len(self.links))
                reached.add(there)
            length = _KINDS.index(action.kind) * self.num_stages + action.stage
            self.turns.append(Turn(rank, length, action.batch, needs, gives, link))
            self.is_there[gives] = True
            self.done[rank] += 1
        return reached

    def _messages(self, action: Action) -> tuple[int, int, int | None]:
        """Return the places of a pass's input and of what comes of it, and who gets that."""
        kind, stage, batch = action
        own = stage * self.num + batch
        gradient, last = self.num_stages * self.num + own, self.num_stages - 1
        if kind == "W":
            return self.places[_AT_ONCE], self.places[_NOWHERE], None
        if kind == "F" and stage < last:
            return self.places[own], self.places[own + self.num], self.ranks[stage + 1]
        if kind == "F":
            return self.places[own], self.places[gradient], None
        if stage:
            before = self.places[gradient - self.num]
            return self.places[gradient], before, self.ranks[stage - 1]
        return self.places[gradient], self.places[_NOWHERE], None
