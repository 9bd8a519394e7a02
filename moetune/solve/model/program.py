"""Programs of the batches of a step, and the queues of device and link that follow from them.

A batch is a thread that issues operations, as `runtime.parallel.overlap` runs it. One batch issues
its own program. Two take turns: a batch gives its turn away where it waits for an exchange, and
goes on once the other one waits and its own exchange has ended. Dense gradients go in the pieces of
a schedule, through a queue of their own (`runtime.parallel.dense_gradients`). All that is predicted
of a step's gradients, with a plan and without, is played in this one timeline.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moetune.domain.constraints import Order
from moetune.domain.gradients import AT_START, GradientSchedule, PieceQueue
from moetune.solve.layer.timeline import COMPUTE, LINK, Task

GRADIENTS = "gradients"
"""The stream of pieces, which have a communicator of their own and share the link."""
_INTERLEAVED_LEAD = 2
"""Dispatches ahead of the experts in interleaved order."""


class Compute(NamedTuple):
    """Computation that the batch's thread runs.

    Args:
        made_bytes: dense gradients that are complete with it.
    """

    seconds: float
    made_bytes: int = 0


class Send(NamedTuple):
    """Issue of an exchange, by a name that is unique in its batch."""

    name: str
    seconds: float


class Wait(NamedTuple):
    """Wait for an exchange.

    Args:
        gives_turn: to the other batch, where there is one.
    """

    name: str
    gives_turn: bool = True


class Turn(NamedTuple):
    """The turn is given away for what the other batch has to do first."""


class Point(NamedTuple):
    """A point of an MoE layer's backward phase at which due gradients are sent.

    Args:
        chunk: before its experts; None behind the phase's last combine.
        behind: the exchange that a piece waits for; empty for none.
    """

    chunk: int | None
    behind: str = ""


Event = Compute | Send | Wait | Turn | Point
Program = Sequence[Event]
ReduceSeconds = Callable[[float], float]
"""Of an all-reduce of so many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """How the dense gradients of a step are reduced.

    Args:
        schedule: of the pieces.
        seconds: of one, alone on the link.
    """

    schedule: GradientSchedule
    seconds: ReduceSeconds


def phase_program(
    name: str,
    *,
    dispatch_seconds: Sequence[float],
    compute_seconds: Sequence[float],
    combine_seconds: Sequence[float],
    order: Order = "dispatch_first",
    is_backward: bool,
) -> Iterator[Event]:
    """Yield what a layer's phase issues, one entry a chunk: `runtime.moe.executor`.

    Args:
        name: unique in the batch.
    """
    degree = len(compute_seconds)
    lead = degree if order == "dispatch_first" else min(degree, _INTERLEAVED_LEAD)
    last = ""
    for chunk in range(lead):
        last = f"dispatch {chunk} of {name}"
        yield Send(last, dispatch_seconds[chunk])
    for chunk in range(degree):
        if order == "interleaved" and chunk and chunk + 1 < degree:
            last = f"dispatch {chunk + 1} of {name}"
            yield Send(last, dispatch_seconds[chunk + 1])
        yield Wait(f"dispatch {chunk} of {name}")
        if is_backward:
            yield Point(chunk, behind=last)
        yield Compute(compute_seconds[chunk])
        last = f"combine {chunk} of {name}"
        yield Send(last, combine_seconds[chunk])
    for chunk in range(degree):
        yield Wait(f"combine {chunk} of {name}")
    if is_backward:
        yield Point(None)


def made_gradients(program: Program) -> list[tuple[int, int]]:
    """Return bytes of the dense gradients in the order in which they are made, with their phases.

    As `domain.gradients.default_schedule` takes them.
    """
    made, phase = list[tuple[int, int]](), AT_START
    for event in program:
        if isinstance(event, Point):
            phase += event.chunk is None
        elif isinstance(event, Compute) and event.made_bytes:
            made.append((event.made_bytes, phase))
    return made


def step_tasks(programs: Sequence[Program], *, reduction: Reduction | None) -> list[Task]:
    """Return the tasks of a step in the order in which they are issued.

    Args:
        programs: one of each batch in flight.
        reduction: None where gradients are not reduced.
    """
    tasks = list[Task]()
    pieces = None
    if reduction is not None:
        num_bytes = sum(size for size, _ in made_gradients(programs[-1]))
        queue = PieceQueue(reduction.schedule, num_bytes)
        pieces = _Pieces(queue, reduction.seconds, [0] * len(programs), len(programs))
    threads = [_issue(program, number, tasks, pieces) for number, program in enumerate(programs)]
    while threads:  # each runs up to its next turn
        for thread in tuple(threads):
            if next(thread, None) is None:
                threads.remove(thread)
    return tasks


@dataclass(slots=True)
class _Pieces:
    """Gradients, which are complete when all batches have made them.

    Args:
        made: bytes that each batch has made.
        running: batches that have not ended.
    """

    queue: PieceQueue
    seconds: ReduceSeconds
    made: list[int]
    running: int

    def reach(self, batch: int, point: Point, tasks: list[Task], last: str) -> None:
        """Issue what is due at a point, of the last batch alone."""
        if batch == len(self.made) - 1:
            self.queue.reach(point.chunk)
            self.send(tasks, (last, f"{point.behind} of {batch}") if point.behind else (last,))

    def take(self, batch: int, num_bytes: int, tasks: list[Task], last: str) -> None:
        """Issue what is due once a batch has made some gradients."""
        self.made[batch] += num_bytes
        if num_bytes:
            self.send(tasks, (last,))

    def end(self, tasks: list[Task], last: str) -> None:
        """Issue the rest where all batches have ended."""
        self.running -= 1
        if not self.running:
            self.send(tasks, (last,), is_end=True)

    def send(self, tasks: list[Task], after: tuple[str, ...], *, is_end: bool = False) -> None:
        """Issue the pieces that are due."""
        begin = self.queue.sent_bytes
        for number in self.queue.due(float("inf") if is_end else min(self.made)):
            end = self.queue.pieces[number].end_bytes
            if end > begin:
                name = f"gradients to {end}"
                tasks.append(Task(name, "comm", GRADIENTS, self.seconds(end - begin), after))
            begin = end


def _issue(
    program: Program, batch: int, tasks: list[Task], pieces: _Pieces | None
) -> Iterator[bool]:
    """Issue a batch's events; stop at each turn that it gives away."""
    last = f"start of {batch}"
    tasks.append(Task(last, "comp", COMPUTE, 0.0))
    for number, event in enumerate(program):
        if isinstance(event, Send):
            name = f"{event.name} of {batch}"
            tasks.append(Task(name, "comm", LINK, event.seconds, (last,)))
        elif isinstance(event, Point):
            if pieces is not None:
                pieces.reach(batch, event, tasks, last)
        elif isinstance(event, Turn):
            yield True
        elif isinstance(event, Wait):
            if event.gives_turn:
                yield True
            last = f"{number} of {batch}"
            tasks.append(Task(last, "comp", COMPUTE, 0.0, (f"{event.name} of {batch}",)))
        else:
            last = f"{number} of {batch}"
            tasks.append(Task(last, "comp", COMPUTE, event.seconds))
            if pieces is not None:
                pieces.take(batch, event.made_bytes, tasks, last)
    if pieces is not None:
        pieces.end(tasks, last)
