"""Fluid simulation of many phases at once, whose streams slow each other down in overlap."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moetune.domain.arrays import Floats, Ints
from moetune.domain.constraints import Order
from moetune.domain.interference import SpeedTable
from moetune.domain.samples import ResourceClass

LINK = "link"
COMPUTE = "compute"
COPIES = "copies"
STREAMS = LINK, COMPUTE, COPIES
_CLASSES: tuple[tuple[ResourceClass | None, ...], ...] = (
    (None, "comm"), (None, "comp", "mem"), (None, "mem"),
)  # fmt: skip
"""Classes that each stream may run; None for an idle stream."""
_SETS = [*product(*_CLASSES)]
"""Sets of classes that may run at once, with one class of each stream."""
_WEIGHTS = (6, 2, 1)
"""Weights of the streams' class indices; the weighted sum is the index of a set in `_SETS`."""
_NEVER = 2**40
"""Index beyond all tasks: a task that waits for it never runs."""


class Task(NamedTuple):
    """One operation.

    Args:
        name: unique in its timeline.
        resource: class of the resource that it keeps busy, which decides the tasks it slows down.
        stream: one of `STREAMS`; its tasks run one after another, in the given order.
        seconds: duration while nothing else runs.
        after: names of the tasks that must end first.
    """

    name: str
    resource: ResourceClass
    stream: str
    seconds: float
    after: tuple[str, ...] = ()


class Span(NamedTuple):
    """A task with its start and its end."""

    name: str
    resource: ResourceClass
    stream: str
    start_seconds: float
    end_seconds: float


def operation_and_chunk(name: str) -> tuple[str, int | None]:
    """Return a task name's operation and chunk from 0, ("dispatch", 0); None without a chunk."""
    operation, _, chunk = name.rpartition(" ")
    return (operation, int(chunk)) if operation and chunk.isdecimal() else (name, None)


def shown_name(name: str) -> str:
    """Return a task's name as people read it, with chunks counted from 1: "dispatch 1"."""
    operation, chunk = operation_and_chunk(name)
    return operation if chunk is None else f"{operation} {chunk + 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The spans in order of issue, and the end of the last span."""

    spans: tuple[Span, ...]
    makespan_seconds: float


def pipeline_tasks(
    *,
    dispatch_seconds: Sequence[float],
    compute_seconds: Sequence[float],
    combine_seconds: Sequence[float],
    order: Order,
) -> list[Task]:
    """Return the tasks of one phase, one entry for each chunk: dispatch, experts, combine.

    The link runs D₁…D_r C₁…C_r, or interleaved D₁ D₂ C₁ D₃ C₂ … C_r. The interleaved order needs
    only two buffers of received rows (MPipeMoE §III-B). The backward phase has the same form.
    """
    chunks = range(len(dispatch_seconds))
    dispatches = [Task(f"dispatch {i}", "comm", LINK, dispatch_seconds[i]) for i in chunks]
    experts = [
        Task(f"experts {i}", "comp", COMPUTE, compute_seconds[i], (f"dispatch {i}",))
        for i in chunks
    ]
    combines = [
        Task(f"combine {i}", "comm", LINK, combine_seconds[i], (f"experts {i}",)) for i in chunks
    ]
    if order == "dispatch_first":
        return [*dispatches, *experts, *combines]
    link = [dispatches[0]]
    for following, combine in zip(dispatches[1:], combines, strict=False):
        link += [following, combine]
    return [*link, combines[-1], *experts]


def tensor_parallel_tasks(
    *, compute_seconds: Sequence[float], reduce_seconds: Sequence[float]
) -> list[Task]:
    """Return the tasks of a tensor-parallel phase: the experts, then their all-reduces."""
    chunks = range(len(compute_seconds))
    return [
        *(Task(f"experts {i}", "comp", COMPUTE, compute_seconds[i]) for i in chunks),
        *(Task(f"sum {i}", "comm", LINK, reduce_seconds[i], (f"experts {i}",)) for i in chunks),
    ]


def simulate(tasks: Sequence[Task], *, speeds: SpeedTable) -> Timeline:
    """Run the tasks, each as early as its stream and its dependencies allow.

    A running task advances at the speed of its class, given the classes that run at that instant.
    Tasks of the same class do not disturb each other.
    """
    program = program_of([[task._replace(seconds=index) for index, task in enumerate(tasks)]])
    durations = np.array([[task.seconds] for task in tasks])
    ends: dict[str, float] = {}
    for event in events(program, program.first, durations, stream_speeds(speeds, 1)):
        for ended in event.head[event.is_ended].tolist():
            ends[tasks[program.duration[ended]].name] = float(event.now[0])
    assert len(ends) == len(tasks), "tasks wait for each other"  # noqa: S101 - our orders
    spans = []
    stream_ends = dict.fromkeys(STREAMS, 0.0)
    for task in tasks:
        start = max([stream_ends[task.stream], *(ends[name] for name in task.after)])
        stream_ends[task.stream] = ends[task.name]
        spans.append(Span(task.name, task.resource, task.stream, start, ends[task.name]))
    return Timeline(spans=tuple(spans), makespan_seconds=max(ends.values()))


class Program(NamedTuple):
    """Tasks of some phases, stream by stream; each stream ends with a task that never runs.

    Args:
        first: index of each stream's first task, shape (streams, phases).
        duration: row of each task's seconds in a table of durations, shape (tasks,).
        place: contribution of its class to the index of a set of classes, shape (tasks,).
        needs: first task that each stream's head must have reached, shape (streams, tasks).
        names: of the tasks; "" for tasks that never run.
    """

    first: Ints
    duration: Ints
    place: Ints
    needs: Ints
    names: tuple[str, ...]


def program_of(phases: Sequence[Sequence[Task]]) -> Program:
    """Return the program of phases whose tasks hold rows of a table of durations as seconds."""
    names: list[str] = []
    firsts, duration, place, needs = [], [], [], []
    for tasks in phases:
        rows = [[task for task in tasks if task.stream == stream] for stream in STREAMS]
        lengths = np.array([0, *(len(row) + 1 for row in rows[:-1])])
        firsts.append(len(names) + np.cumsum(lengths))
        index = {task.name: (stream, int(start) + position)
                 for stream, (start, row) in enumerate(zip(firsts[-1], rows, strict=True))
                 for position, task in enumerate(row)}  # fmt: skip
        for stream, row in enumerate(rows):
            for task in row:
                duration.append(int(task.seconds))
                place.append(_WEIGHTS[stream] * _CLASSES[stream].index(task.resource))
                ends = [0] * len(STREAMS)
                for before_stream, position in map(index.__getitem__, task.after):
                    ends[before_stream] = max(ends[before_stream], position + 1)
                needs.append(ends)
            names += [*(task.name for task in row), ""]
            duration, place, needs = [*duration, 0], [*place, 0], [*needs, [_NEVER] * len(STREAMS)]
    return Program(
        first=np.array(firsts).T, duration=np.array(duration), place=np.array(place),
        needs=np.array(needs).T, names=tuple(names),
    )  # fmt: skip


def stream_speeds(table: SpeedTable, num: int) -> Floats:
    """Return each stream's speed in each set of classes (1 if idle), shape (streams, sets, num)."""
    speeds = np.ones((len(STREAMS), len(_SETS), num))
    for index, classes in enumerate(_SETS):
        for stream, name in enumerate(classes):
            rivals = {rival for rival in classes if rival} - {name}
            if name and rivals:
                key = "all" if len(rivals) > 1 else next(iter(rivals))
                speeds[stream, index] = table[name, key]
    return speeds


class Event(NamedTuple):
    """An instant at which tasks of n phases end; a finished phase stays as it was.

    Args:
        now: shape (n,).
        head: the task that each stream was at until now, shape (streams, n).
        is_ended: whether that task ends now, of the same shape.
        left: seconds left of the tasks at the heads of the streams from now on, of the same shape.
    """

    now: Floats
    head: Ints
    is_ended: NDArray[np.bool_]
    left: Floats


def events(program: Program, head: Ints, durations: Floats, speeds: Floats) -> Iterator[Event]:
    """Run n phases, and yield the ends of their tasks until no task runs.

    Args:
        head: each stream's first task, shape (streams, n).
        durations: seconds of each phase's operations, shape (operations, n).
        speeds: as of `stream_speeds`, shape (streams, sets, n).
    """
    phases, streams = np.arange(head.shape[1]), np.arange(len(STREAMS))[:, None]
    now, left = np.zeros(len(phases)), durations[program.duration[head], phases]
    while True:
        running = (head[:, None] >= program.needs[:, head]).all(axis=0)
        is_going = running.any(axis=0)
        if not is_going.any():
            return
        sets = np.where(running, program.place[head], 0).sum(axis=0)
        speed = speeds[streams, sets, phases]
        times = np.where(running, left / speed, np.inf)
        seconds = np.where(is_going, times.min(axis=0), 0.0)
        is_ended, now, before = times <= seconds, now + seconds, head
        head = head + is_ended
        left = np.where(running, left - seconds * speed, left)
        left = np.where(is_ended, durations[program.duration[head], phases], left)
        yield Event(now, before, is_ended, left)
