"""Sizes of the pieces in which dense gradients are reduced while the link would be idle.

The backward pass of a model with experts keeps the link busy in its exchanges and idle between
them. Data-parallel gradients that are reduced all at once compete with the exchanges; in pieces
of the right sizes they fill the idle times and delay nothing (FSMoE's idea). The whole pass is
simulated with the pieces in the link's queue, so that what is predicted is what is run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from moetune.domain.constraints import Order
from moetune.domain.costs import Interference
from moetune.domain.gradients import AT_START, GradientPiece, GradientSchedule
from moetune.solve.layer.timeline import COMPUTE, LINK, Task, Timeline, pipeline_tasks, simulate

_AHEAD = (0, 1, 2, 4, 8)
"""Exchanges that a piece may delay, tried in turn for each slot."""
_ROUNDING = 1e-9
"""Of the whole: what is less is no gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DensePart:
    """Computation of the backward pass outside of the experts.

    Args:
        num_bytes: of the gradients that it makes.
    """

    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardStage:
    """One MoE layer's backward phase, and the dense computation up to the next one's.

    Args:
        dispatch_seconds, compute_seconds, combine_seconds: one entry a chunk; empty for the dense
            computation before the first MoE layer's phase.
        dense: in the order of the backward pass.
        order: of the link's exchanges.
    """

    dispatch_seconds: tuple[float, ...] = ()
    compute_seconds: tuple[float, ...] = ()
    combine_seconds: tuple[float, ...] = ()
    dense: tuple[DensePart, ...] = ()
    order: Order = "dispatch_first"

    @property
    def num_bytes(self) -> int:
        """Dense gradients that it makes."""
        return sum(part.num_bytes for part in self.dense)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardPass:
    """The backward pass of one step on every rank, last layer first.

    Args:
        reduce_seconds: an all-reduce of so many bytes, which does not take less for more.
    """

    stages: tuple[BackwardStage, ...]
    reduce_seconds: Callable[[float], float]
    interference: Interference = field(default_factory=Interference)

    @property
    def num_bytes(self) -> int:
        """All dense gradients."""
        return sum(stage.num_bytes for stage in self.stages)


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


def best_pieces(backward: BackwardPass) -> PlannedGradients:
    """Return the pieces that make the backward pass end earliest.

    Greedy, slot by slot, and twice: first the piece that fills the link's idle time up to the next
    exchange; then, with what is left, up to a later one, which delays exchanges that nothing waits
    for. A piece is taken where the whole pass ends earlier. Sending early leaves every later slot
    as much idle time as before; only start-up times make the result less than optimal.
    """
    items = tuple(_issued(backward.stages))
    slots = tuple(item for item in items if isinstance(item, _Slot))
    sizes = dict.fromkeys(slots, 0)
    at_end = best = _run(backward, items, sizes)
    for ahead in _AHEAD:
        for index, slot in enumerate(slots):
            free = best if not sizes[slot] else _run(backward, items, sizes | {slot: 0})
            size = _filling(backward, items, free, slot, ahead)
            size = min(size, sizes[slot] + _left(slots[index:], sizes))
            if size > sizes[slot]:
                found = _run(backward, items, sizes | {slot: size})
                if found.makespan_seconds < best.makespan_seconds * (1 - _ROUNDING):
                    best, sizes = found, sizes | {slot: size}
    return PlannedGradients(
        schedule=_schedule(sizes),
        timeline=best,
        at_end_seconds=at_end.makespan_seconds,
        alone_seconds=_run(backward, items, sizes, with_gradients=False).makespan_seconds,
    )


def ready_bytes(backward: BackwardPass) -> tuple[int, ...]:
    """Return how many gradients there are at each slot, the points where a piece may be sent."""
    items = _issued(backward.stages)
    return tuple(item.ready_bytes for item in items if isinstance(item, _Slot))


def simulate_pieces(backward: BackwardPass, sizes: Sequence[int]) -> Timeline:
    """Return the timeline with a piece of so many bytes in each slot, and the rest at the end.

    Raises:
        ValueError: a piece has gradients that are not made yet.
    """
    items = tuple(_issued(backward.stages))
    slots = [item for item in items if isinstance(item, _Slot)]
    for slot, sent in zip(slots, accumulate(sizes), strict=True):
        if sent > slot.ready_bytes:
            raise ValueError(f"{sent} bytes are to be sent and {slot.ready_bytes} made")
    return _run(backward, items, dict(zip(slots, sizes, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """A point of the backward pass at which a piece may be sent.

    Args:
        phase, chunk: as of `GradientPiece`.
        ready_bytes: gradients that there are.
        after: tasks that have ended; with several slots of one phase and chunk they differ.
    """

    phase: int
    chunk: int | None
    ready_bytes: int
    after: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the piece's task."""
        return f"gradients after {' and '.join(self.after)}"


def _issued(stages: Sequence[BackwardStage]) -> Iterator[Task | _Slot]:
    """Yield tasks and slots in the order in which the runtime issues them to each stream."""
    ready, phase = 0, AT_START
    previous: tuple[str, ...] = ()
    for number, stage in enumerate(stages):
        if stage.compute_seconds:
            phase += 1
            yield from _phase_items(phase, stage, previous, ready)
            last = (f"combine {len(stage.compute_seconds) - 1} of {phase}",)
            previous = last
            yield _Slot(phase=phase, chunk=None, ready_bytes=ready, after=last)
        for index, part in enumerate(stage.dense):
            name = f"dense {index} of stage {number}"
            yield Task(name, "comp", COMPUTE, part.seconds, previous)
            ready, previous = ready + part.num_bytes, (name,)
            yield _Slot(phase=phase, chunk=None, ready_bytes=ready, after=previous)


def _phase_items(
    phase: int, stage: BackwardStage, previous: tuple[str, ...], ready: int
) -> Iterator[Task | _Slot]:
    """Yield a phase's tasks; the slot before a chunk's experts is in front of its combine."""
    tasks = pipeline_tasks(
        dispatch_seconds=stage.dispatch_seconds, compute_seconds=stage.compute_seconds,
        combine_seconds=stage.combine_seconds, order=stage.order,
    )  # fmt: skip
    for task in tasks:
        step, _, chunk = task.name.partition(" ")
        if step == "combine":
            after = [f"dispatch {chunk} of {phase}"]
            after += [f"experts {int(chunk) - 1} of {phase}"] if int(chunk) else []
            yield _Slot(phase=phase, chunk=int(chunk), ready_bytes=ready, after=tuple(after))
        after = [f"{name} of {phase}" for name in task.after] or list(previous)
        yield task._replace(name=f"{task.name} of {phase}", after=tuple(after))


def _run(
    backward: BackwardPass,
    items: Sequence[Task | _Slot],
    sizes: Mapping[_Slot, int],
    *,
    with_gradients: bool = True,
) -> Timeline:
    seconds, tasks = backward.reduce_seconds, list[Task]()
    for item in items:
        if isinstance(item, Task):
            tasks.append(item)
        elif with_gradients and sizes[item]:
            tasks.append(Task(item.name, "comm", LINK, seconds(sizes[item]), item.after))
    rest = backward.num_bytes - sum(sizes.values())
    if with_gradients and rest:
        ends = tuple(item.name for item in items if isinstance(item, Task))[-1:]
        tasks.append(Task("gradients at the end", "comm", LINK, seconds(rest), ends))
    return simulate(tasks, interference=backward.interference)


def _left(slots: Sequence[_Slot], sizes: Mapping[_Slot, int]) -> int:
    """Return how much more the first of these slots, the last of all, can send."""
    before = sum(sizes.values()) - sum(sizes[slot] for slot in slots)
    sent = accumulate((sizes[slot] for slot in slots), initial=before)
    return min(slot.ready_bytes - total for slot, total in zip(slots, list(sent)[1:], strict=True))


def _filling(
    backward: BackwardPass,
    items: Sequence[Task | _Slot],
    timeline: Timeline,
    slot: _Slot,
    ahead: int,
) -> int:
    """Return how many bytes fill the link from the slot to one of the next exchanges.

    Args:
        timeline: without a piece in the slot.
        ahead: exchanges between, which the piece delays.
    """
    spans = {span.name: span for span in timeline.spans}
    place = items.index(slot)
    names = [
        [item.name for item in part if item.name in spans and spans[item.name].stream == LINK]
        for part in (items[:place], items[place + 1 :])
    ]
    start = max(spans[name].end_seconds for name in (*slot.after, *names[0]))
    delayed, following = names[1][:ahead], names[1][ahead : ahead + 1]
    most = slot.ready_bytes
    if not following:
        return most
    busy = sum(spans[name].end_seconds - spans[name].start_seconds for name in delayed)
    return _bytes_in(backward, spans[following[0]].start_seconds - start - busy, most)


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


def _schedule(sizes: Mapping[_Slot, int]) -> GradientSchedule:
    ends = accumulate(sizes.values())
    return GradientSchedule(
        pieces=tuple(
            GradientPiece(phase=slot.phase, chunk=slot.chunk, end_bytes=end)
            for (slot, size), end in zip(sizes.items(), ends, strict=True)
            if size
        )
    )
