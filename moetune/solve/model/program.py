"""Programs of the batches of a step, and the queues of device and link that follow from them.

A batch is a thread that issues operations, as `runtime.parallel.overlap` runs it. One batch issues
its own program. Two take turns: a batch gives its turn away where it waits for an exchange, and
goes on once the other one waits and its own exchange has ended. Dense gradients go in pieces behind
the exchanges that were issued before (`runtime.parallel.dense_gradients`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moetune.domain.gradients import TAIL_BYTES
from moetune.solve.layer.timeline import COMPUTE, LINK, Task

GRADIENTS = "gradients"
"""The stream of pieces, which have a communicator of their own and share the link."""


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


class PhaseEnd(NamedTuple):
    """The end of an MoE layer's backward phase, where gradients that are made may be sent."""

    is_last: bool


Event = Compute | Send | Wait | PhaseEnd
ReduceSeconds = Callable[[float], float]
"""Of an all-reduce of so many bytes."""


def step_tasks(
    programs: Sequence[Sequence[Event]], *, reduce_seconds: ReduceSeconds | None
) -> list[Task]:
    """Return the tasks of a step in the order in which they are issued.

    Args:
        programs: one of each batch in flight.
        reduce_seconds: None where gradients are not reduced.
    """
    tasks = list[Task]()
    pieces = None if reduce_seconds is None else _Pieces(reduce_seconds)
    threads = [
        _issue(program, f"{number}", tasks, pieces if number == len(programs) - 1 else None)
        for number, program in enumerate(programs)
    ]
    while threads:  # each runs up to its next turn
        for thread in tuple(threads):
            if next(thread, None) is None:
                threads.remove(thread)
    return tasks


@dataclass(slots=True)
class _Pieces:
    """Gradients of the batch that is behind, which are complete when it has made them."""

    seconds: ReduceSeconds
    made: int = 0
    sent: int = 0
    is_tail: bool = False

    def send(self, tasks: list[Task], behind: str, *, all_of_them: bool = True) -> None:
        """Issue a piece of what is made and not sent."""
        size = self.made - self.sent
        if size and (all_of_them or size >= TAIL_BYTES):
            name = f"gradients to {self.made}"
            tasks.append(Task(name, "comm", GRADIENTS, self.seconds(size), (behind,)))
            self.sent = self.made


def _issue(
    program: Sequence[Event], batch: str, tasks: list[Task], pieces: _Pieces | None
) -> Iterator[bool]:
    """Issue a batch's events; stop at each turn that it gives away."""
    last = f"start of {batch}"
    tasks.append(Task(last, "comp", COMPUTE, 0.0))
    for number, event in enumerate(program):
        if isinstance(event, Send):
            name = f"{event.name} of {batch}"
            tasks.append(Task(name, "comm", LINK, event.seconds, (last,)))
        elif isinstance(event, PhaseEnd):
            if pieces is not None:
                pieces.is_tail = event.is_last
                pieces.send(tasks, last)
        else:
            if isinstance(event, Wait):
                if event.gives_turn:
                    yield True
                seconds, after = 0.0, [f"{event.name} of {batch}"]
            else:
                seconds, after = event.seconds, []
            last = f"{number} of {batch}"
            tasks.append(Task(last, "comp", COMPUTE, seconds, tuple(after)))
            if pieces is not None and isinstance(event, Compute):
                pieces.made += event.made_bytes
                if pieces.is_tail:
                    pieces.send(tasks, last, all_of_them=False)
    if pieces is not None:
        pieces.send(tasks, last)
