"""Passes of all ranks of a schedule in one order, in which each comes after its input.

What a pass waits for does not depend on how long the others take, so that it is found once for all
pipelines of a schedule.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple, TypeAlias

from moetune.domain.pipeline import Schedule, rank_of_stage
from moetune.solve.training.schedule import PASS_WORDS, Pass, orders

KINDS = tuple(PASS_WORDS)

Turn: TypeAlias = tuple[int, int, int, int, int, int | None]
"""A pass: its rank, which of `StagePipeline.lengths` it takes, its micro-batch, the places of the
message that it needs and of the one that comes of it, and the way to another rank that this goes;
None where it stays."""


class Timetable(NamedTuple):
    """The passes, and how many places of messages and ways between ranks there are."""

    turns: tuple[Turn, ...]
    num_places: int
    num_links: int


class _Route(NamedTuple):
    """What the passes of one kind and stage have in common.

    Args:
        length: its number among `StagePipeline.lengths`.
        needs, gives: first places of the messages of each micro-batch.
        link, there: the way to another rank, and that rank; None where the message stays.
    """

    length: int
    needs: int
    gives: int
    link: int | None
    there: int | None


@lru_cache(maxsize=16)
def timetable(schedule: Schedule, pp: int, vpp: int, num: int) -> Timetable:
    """Return the passes of so many micro-batches."""
    ranks = tuple(rank_of_stage(stage, pp, schedule) for stage in range(pp * vpp))
    links: dict[tuple[int, int], int] = {}
    routes = {
        (kind, stage): _route(kind, stage, ranks, num, links)
        for kind in KINDS
        for stage in range(len(ranks))
    }
    num_places = 2 * (len(ranks) + 1) * num
    is_there = [False] * num_places
    is_there[:num] = is_there[-2 * num : -num] = [True] * num
    every, turns = orders(schedule, pp, vpp, num), list[Turn]()
    done, waiting = [0] * pp, [*range(pp)]
    while waiting:
        rank, reached = waiting.pop(), set[int]()
        for kind, stage, batch in islice(every[rank], done[rank], None):
            length, needs, gives, link, there = routes[kind, stage]
            if not is_there[needs + batch]:
                break
            turns.append((rank, length, batch, needs + batch, gives + batch, link))
            is_there[gives + batch] = True
            done[rank] += 1
            if there is not None:
                reached.add(there)
        waiting += reached
    assert done == [*map(len, every)], "ranks wait for each other"  # noqa: S101 - our orders
    return Timetable(turns=tuple(turns), num_places=num_places, num_links=len(links))


def _route(
    kind: Pass, stage: int, ranks: Sequence[int], num: int, links: dict[tuple[int, int], int]
) -> _Route:
    """Return the route of a stage's passes of a kind.

    Inputs of all stages have the first places, their gradients the next ones; then come what is
    there at once, and what nothing needs.

    Args:
        num: micro-batches.
        links: the ways between ranks, to which this one's is added.
    """
    count, last = len(ranks), len(ranks) - 1
    length = KINDS.index(kind) * count + stage
    at_once, nowhere = 2 * count * num, (2 * count + 1) * num
    inputs, gradients = stage * num, (count + stage) * num
    if kind == "W":
        return _Route(length, at_once, nowhere, None, None)
    if kind == "F" and stage == last:
        return _Route(length, inputs, gradients, None, None)
    if kind != "F" and stage == 0:
        return _Route(length, gradients, nowhere, None, None)
    to = stage + 1 if kind == "F" else stage - 1
    needs, gives = (inputs, inputs + num) if kind == "F" else (gradients, gradients - num)
    if ranks[stage] == ranks[to]:
        return _Route(length, needs, gives, None, None)
    link = links.setdefault((ranks[stage], ranks[to]), len(links))
    return _Route(length, needs, gives, link, ranks[to])
