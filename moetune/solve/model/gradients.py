"""Sizes of the pieces in which dense gradients are reduced while the link would be idle.

The backward pass of a model with experts keeps the link busy in its exchanges and idle between
them. Data-parallel gradients that are reduced all at once compete with the exchanges; in pieces
of the right sizes they fill the idle times and delay nothing (FSMoE's idea). The whole pass is
played with the pieces in the timeline of a step (`program`), by the queue that the runtime follows.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from moetune.domain.gradients import (
    GradientPiece,
    GradientSchedule,
    PieceQueue,
    default_schedule,
)
from moetune.domain.interference import Interference
from moetune.solve.layer.timeline import COMPUTE, LINK, Timeline, simulate
from moetune.solve.model.program import (
    GRADIENTS,
    Compute,
    Point,
    Program,
    ReduceSeconds,
    Reduction,
    Send,
    made_gradients,
    step_tasks,
)

_AHEAD = (0, 1, 2, 4, 8)
"""Exchanges that a piece may delay, tried in turn for each slot."""
_ROUNDING = 1e-9
"""Of the whole: what is less is no gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGradients:
    """A schedule and its prediction.

    Args:
        timeline: of the backward pass with the pieces, until the last gradient is reduced.
        at_end_seconds: the same with all gradients reduced at the end.
        alone_seconds: the same without any gradient to reduce.
    """

    schedule: GradientSchedule
    timeline: Timeline
    at_end_seconds: float
    alone_seconds: float

    @property
    def seconds(self) -> float:
        """The backward pass and its gradients."""
        return self.timeline.makespan_seconds


@dataclass(frozen=True, kw_only=True)
class BackwardPass:
    """The backward pass of one step on every rank.

    Args:
        program: of one batch.
        reduce_seconds: an all-reduce of so many bytes, which does not take less for more.
    """

    program: Program
    reduce_seconds: ReduceSeconds
    interference: Interference = field(default_factory=Interference)

    def timeline(self, schedule: GradientSchedule | None) -> Timeline:
        """Return the timeline with these pieces; None for no gradients to reduce."""
        reduction = None
        if schedule is not None:
            reduction = Reduction(schedule=schedule, seconds=self.reduce_seconds)
        tasks = step_tasks([self.program], reduction=reduction)
        return simulate(tasks, interference=self.interference, shares_link=True)

    @cached_property
    def slots(self) -> "tuple[PieceSlot, ...]":
        """The points at which a piece may be sent, in their order."""
        return tuple(_slots(self.program))


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSlot:
    """A point of the backward pass at which a piece may be sent.

    Args:
        phase, chunk: as of `GradientPiece`.
        ready_bytes: gradients that there are.
        num_tasks: that were issued before, without pieces.
    """

    phase: int
    chunk: int | None
    ready_bytes: int
    num_tasks: int


def best_pieces(backward: BackwardPass) -> PlannedGradients:
    """Return the pieces that make the backward pass end earliest.

    Greedy, slot by slot, and twice: first the piece that fills the link's idle time up to the next
    exchange; then, with what is left, up to a later one, which slows exchanges that nothing waits
    for. A piece is taken where the whole pass ends earlier. Sending early leaves every later slot
    as much idle time as before; only start-up times make the result less than optimal. Where they
    decide, pieces without a plan, or all gradients as they are made, may be better, and are taken.
    """
    at_end = backward.timeline(GradientSchedule())
    others = default_schedule(made_gradients(backward.program)), _as_made(backward)
    schedule, best = min(
        (_filled(backward, at_end), *((other, backward.timeline(other)) for other in others)),
        key=lambda one: one[1].makespan_seconds,
    )
    return PlannedGradients(
        schedule=schedule,
        timeline=best,
        at_end_seconds=at_end.makespan_seconds,
        alone_seconds=backward.timeline(None).makespan_seconds,
    )


def schedule_of(sizes: Mapping[PieceSlot, int]) -> GradientSchedule:
    """Return the schedule of a piece of so many bytes in each slot, and the rest at the end."""
    ends = accumulate(sizes.values())
    return GradientSchedule(
        pieces=tuple(
            GradientPiece(phase=slot.phase, chunk=slot.chunk, end_bytes=end)
            for (slot, size), end in zip(sizes.items(), ends, strict=True)
            if size
        )
    )


def _slots(program: Program) -> Iterator[PieceSlot]:
    queue, ready, num_tasks = PieceQueue(GradientSchedule(), 0), 0, 1  # of the start
    for event in program:
        if isinstance(event, Point):
            queue.reach(event.chunk)
        else:
            num_tasks += 1
            if not isinstance(event, Compute) or not event.made_bytes:
                continue
            ready += event.made_bytes
        phase, chunk = queue.position
        yield PieceSlot(
            phase=int(phase), chunk=None if chunk == math.inf else int(chunk),
            ready_bytes=ready, num_tasks=num_tasks,
        )  # fmt: skip


def _filled(backward: BackwardPass, at_end: Timeline) -> tuple[GradientSchedule, Timeline]:
    """Return the greedy choice of `best_pieces`, and its timeline."""
    slots, best = backward.slots, at_end
    sizes = dict.fromkeys(slots, 0)
    for ahead in _AHEAD:
        for index, slot in enumerate(slots):
            free = best
            if sizes[slot]:
                free = backward.timeline(schedule_of(sizes | {slot: 0}))
            num_pieces = sum(sizes[one] > 0 for one in slots[:index])
            size = _filling(backward, free, slot, num_pieces, ahead)
            size = min(size, sizes[slot] + _left(slots[index:], sizes))
            if size > sizes[slot]:
                found = backward.timeline(schedule_of(sizes | {slot: size}))
                if found.makespan_seconds < best.makespan_seconds * (1 - _ROUNDING):
                    best, sizes = found, sizes | {slot: size}
    return schedule_of(sizes), best


def _as_made(backward: BackwardPass) -> GradientSchedule:
    """Return the schedule of all gradients, each as soon as it is made."""
    ready = [slot.ready_bytes for slot in backward.slots]
    made = (now - before for now, before in zip(ready, [0, *ready], strict=False))
    return schedule_of(dict(zip(backward.slots, made, strict=True)))


def _left(slots: Sequence[PieceSlot], sizes: Mapping[PieceSlot, int]) -> int:
    """Return how much more the first of these slots, the last of all, can send."""
    before = sum(sizes.values()) - sum(sizes[slot] for slot in slots)
    sent = accumulate((sizes[slot] for slot in slots), initial=before)
    return min(slot.ready_bytes - total for slot, total in zip(slots, list(sent)[1:], strict=True))


def _filling(
    backward: BackwardPass, timeline: Timeline, slot: PieceSlot, num_pieces: int, ahead: int
) -> int:
    """Return how many bytes fill the link from the slot to one of the next exchanges.

    Args:
        timeline: without a piece in the slot.
        num_pieces: that are sent before.
        ahead: exchanges between, which the piece slows.
    """
    own = [span for span in timeline.spans if span.stream != GRADIENTS]
    pieces = [span for span in timeline.spans if span.stream == GRADIENTS]
    before = [
        *(each.end_seconds for each in own[: slot.num_tasks] if each.stream in {COMPUTE, LINK}),
        *(each.end_seconds for each in pieces[:num_pieces]),
    ]
    following = [each for each in own[slot.num_tasks :] if each.stream == LINK]
    if len(following) <= ahead:
        return slot.ready_bytes
    sent = [event.seconds for event in backward.program if isinstance(event, Send)]
    first = len(sent) - len(following)
    busy = sum(sent[first : first + ahead])
    return _bytes_in(
        backward, following[ahead].start_seconds - max(before) - busy, slot.ready_bytes
    )


def _bytes_in(backward: BackwardPass, seconds: float, most: int) -> int:
    """Return how many bytes, `most` at the most, are reduced in that time."""
    if backward.reduce_seconds(most) <= seconds:
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if backward.reduce_seconds(middle) <= seconds:
            low = middle
        else:
            high = middle
    return low
