"""Passes of all ranks of a schedule in one order, in which each comes after its input.

What a pass waits for does not depend on how long the others take, so that it is found once for all
pipelines of a schedule.
"""

from bisect import bisect_left
from collections.abc import Sequence
from copy import copy
from functools import lru_cache, partial
from typing import NamedTuple, TypeAlias

from moetune.domain.pipeline import Schedule, rank_of_stage
from moetune.solve.training.schedule import PASS_WORDS, Action, Order, Pass, orders

_KINDS = tuple(PASS_WORDS)

Turn: TypeAlias = tuple[int, int, int, int, int, int | None]
"""A pass: its rank, which of `StagePipeline.lengths` it takes, its micro-batch, the places of the
message that it needs and of the one that comes of it, and the way to another rank that this goes;
None where it stays."""


class Timetable(NamedTuple):
    """The passes, and how many places of messages and ways between ranks there are.

    Args:
        shared: passes that come first whatever the number of micro-batches.
        tails: the passes after them, for each number.
    """

    shared: tuple[Turn, ...]
    tails: tuple[tuple[Turn, ...], ...]
    num_stages: int
    num_places: int
    num_links: int

    def action(self, turn: Turn) -> Action:
        """Return what a rank does in its turn."""
        _, length, batch, *_ = turn
        kind, stage = divmod(length, self.num_stages)
        return _KINDS[kind], stage, batch


@lru_cache(maxsize=32)
def timetable(schedule: Schedule, pp: int, vpp: int, *nums: int) -> Timetable:
    """Return the passes of one number of micro-batches, or of several."""
    every = [orders(schedule, pp, vpp, num) for num in nums]
    ranks = tuple(rank_of_stage(stage, pp, schedule) for stage in range(pp * vpp))
    made = _Turns(ranks, max(nums))
    shared = made.turns([*map(_same_start, zip(*every, strict=True))])
    tails = []
    for one in every:
        rest = made.copy()
        tails.append(rest.turns(one))
        assert rest.done == [*map(len, one)], "ranks wait for each other"  # noqa: S101 - our orders
    return Timetable(
        shared=shared, tails=tuple(tails), num_stages=len(ranks),
        num_places=len(made.is_there), num_links=len(made.links),
    )  # fmt: skip


def _same_start(of_rank: tuple[Order, ...]) -> Order:
    """Return the first passes that all orders of a rank have."""
    first, *others = of_rank
    lengths = range(1, min(map(len, of_rank)) + 1)
    differs = partial(_is_different, first, others)
    return first[: bisect_left(lengths, True, key=differs)]  # noqa: FBT003 - sought among them


def _is_different(first: Order, others: Sequence[Order], length: int) -> bool:
    return any(one[:length] != first[:length] for one in others)


class _Route(NamedTuple):
    """What the passes of one kind and stage have in common.

    Args:
        needs, gives: places of the messages of each micro-batch.
        there: the rank that gets what comes of it; None where that stays.
    """

    length: int
    needs: Sequence[int]
    gives: Sequence[int]
    link: int | None
    there: int | None


class _Turns:
    """How far ranks are in their orders, and the messages that are there.

    Inputs of all stages have the first places, their gradients the next ones; the last two are of
    what is there at once, and of what nothing needs.
    """

    def __init__(self, ranks: tuple[int, ...], num: int) -> None:
        self.ranks, self.num = ranks, num
        self.is_there = [True] * num + [False] * (2 * len(ranks) - 1) * num + [True, False]
        self.places = [*range(len(self.is_there))]
        self.done = [0] * (max(ranks) + 1)
        self.links: dict[tuple[int, int], int] = {}
        self.routes = {
            kind: [self._route(kind, stage) for stage in range(len(ranks))] for kind in _KINDS
        }

    def copy(self) -> "_Turns":
        """Return what goes on from here by itself."""
        other = copy(self)
        other.is_there, other.done = self.is_there.copy(), self.done.copy()
        return other

    def turns(self, every: Sequence[Order]) -> tuple[Turn, ...]:
        """Return the passes of all ranks' orders, as far as their inputs get there."""
        turns: list[Turn] = []
        waiting = [*range(len(every))]
        while waiting:
            rank = waiting.pop()
            waiting += self._advance(rank, every[rank], turns)
        return tuple(turns)

    def _advance(self, rank: int, order: Order, turns: list[Turn]) -> set[int]:
        """Do a rank's passes until one lacks its input; return the ranks that have got some."""
        reached, is_there, routes = set(), self.is_there, self.routes
        at = self.done[rank]
        while at < len(order):
            kind, stage, batch = order[at]
            length, needing, giving, link, there = routes[kind][stage]
            needs = needing[batch]
            if not is_there[needs]:
                break
            gives = giving[batch]
            turns.append((rank, length, batch, needs, gives, link))
            is_there[gives] = True
            at += 1
            if there is not None:
                reached.add(there)
        self.done[rank] = at
        return reached

    def _route(self, kind: Pass, stage: int) -> _Route:
        last = len(self.ranks) - 1
        length = _KINDS.index(kind) * len(self.ranks) + stage
        inputs, gradients = self._row(stage), self._row(last + 1 + stage)
        at_once, nowhere = ([place] * self.num for place in self.places[-2:])
        if kind == "W":
            return _Route(length, at_once, nowhere, None, None)
        if kind == "F":
            if stage == last:
                return _Route(length, inputs, gradients, None, None)
            return _Route(length, inputs, self._row(stage + 1), *self._way(stage, stage + 1))
        if stage == 0:
            return _Route(length, gradients, nowhere, None, None)
        return _Route(length, gradients, self._row(last + stage), *self._way(stage, stage - 1))

    def _row(self, number: int) -> list[int]:
        """Return the places of a stage's inputs, or gradients, one for each micro-batch."""
        return self.places[number * self.num : (number + 1) * self.num]

    def _way(self, stage: int, to: int) -> tuple[int | None, int | None]:
        """Return the way between two stages, and the rank where it ends; None within a rank."""
        here, there = self.ranks[stage], self.ranks[to]
        if here == there:
            return None, None
        return self.links.setdefault((here, there), len(self.links)), there
