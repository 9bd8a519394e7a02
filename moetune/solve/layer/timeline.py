"""Fluid simulation: tasks on streams that slow each other down while they overlap."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moetune.domain.constraints import Order
from moetune.domain.interference import Interference
from moetune.domain.samples import ResourceClass

LINK = "link"
COMPUTE = "compute"


class Task(NamedTuple):
    """One operation; a NamedTuple, since a search builds thousands of them.

    Args:
        name: unique in its timeline.
        resource: class of what it keeps busy, which decides the tasks that it slows down.
        stream: tasks of one stream run one after another, in the order they are given.
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
    """Return the parts of a task's name, a chunk from 0: ("dispatch", 0); None for no chunk's."""
    operation, _, chunk = name.rpartition(" ")
    return (operation, int(chunk)) if operation and chunk.isdecimal() else (name, None)


def shown_name(name: str) -> str:
    """Return a task's name as people read it, who count chunks from 1: "dispatch 1"."""
    operation, chunk = operation_and_chunk(name)
    return operation if chunk is None else f"{operation} {chunk + 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The spans in order of issue, and when the last one ends."""

    spans: tuple[Span, ...]
    makespan_seconds: float


def simulate(tasks: Sequence[Task], *, interference: Interference) -> Timeline:
    """Run the tasks, each as early as its stream and its dependencies let it.

    A running task advances at the speed that `interference` gives its class among the set of
    classes that run at that instant; tasks of one class do not disturb each other.

    Raises:
        ValueError: tasks wait for each other.
    """
    run = _Run(tasks)
    makespan_seconds = run.finish(interference)
    spans = tuple(
        Span(task.name, task.resource, task.stream, start, end)
        for task, start, end in zip(tasks, run.starts, run.ends, strict=True)
    )
    return Timeline(spans=spans, makespan_seconds=makespan_seconds)


def pipeline_tasks(
    *,
    dispatch_seconds: Sequence[float],
    compute_seconds: Sequence[float],
    combine_seconds: Sequence[float],
    order: Order,
) -> list[Task]:
    """Return the tasks of one phase, one entry a chunk: dispatch, experts, combine.

    The link runs D₁…D_r C₁…C_r, or interleaved D₁ D₂ C₁ D₃ C₂ … C_r, which two buffers of
    received rows suffice for (MPipeMoE §III-B). The backward phase has the same form.
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
    *,
    compute_seconds: Sequence[float],
    reduce_seconds: Sequence[float],
    gather_seconds: float = 0.0,
) -> list[Task]:
    """Return the tasks of one phase in tensor parallelism: experts, then their all-reduce.

    Args:
        gather_seconds: of the tokens, which the first chunk waits for; 0 for none.
    """
    chunks = range(len(compute_seconds))
    gather = [Task("gather", "comm", LINK, gather_seconds)] if gather_seconds else []
    first = tuple(task.name for task in gather)
    return [
        *gather,
        *(Task(f"experts {i}", "comp", COMPUTE, compute_seconds[i], first) for i in chunks),
        *(Task(f"sum {i}", "comm", LINK, reduce_seconds[i], (f"experts {i}",)) for i in chunks),
    ]


class _Run:
    """State of one simulation, in lists by a task's place: a search runs thousands of them."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self._waiting = [len(task.after) for task in tasks]
        self._dependents = _dependents(tasks)
        self._queues: dict[str, list[int]] = {}
        for index, task in enumerate(tasks):
            self._queues.setdefault(task.stream, []).append(index)
        for queue in self._queues.values():
            queue.reverse()  # the head is the last entry, where it is cheap to take
        self._queue_of = [self._queues[task.stream] for task in tasks]
        self.starts = [0.0] * len(tasks)
        self.ends = [0.0] * len(tasks)

    def finish(self, interference: Interference) -> float:
        """Run all tasks and return when the last one ends.

        Raises:
            ValueError: tasks wait for each other.
        """
        tasks, ends, now = self._tasks, self.ends, 0.0
        remaining = [task.seconds for task in tasks]
        speeds: dict[tuple[ResourceClass, ...], dict[ResourceClass, float]] = {}
        running = [queue[-1] for queue in self._queues.values() if not self._waiting[queue[-1]]]
        while running:
            classes = tuple([tasks[index].resource for index in running])
            speed = speeds.get(classes)
            if speed is None:
                among = frozenset(classes)
                speed = speeds[classes] = {one: interference.speed(one, among) for one in among}
            times = [remaining[index] / speed[tasks[index].resource] for index in running]
            step = min(times)
            now += step
            going = []
            ended = []
            for index, seconds in zip(running, times, strict=True):
                if seconds > step:
                    remaining[index] -= step * speed[tasks[index].resource]
                    going.append(index)
                else:
                    ends[index] = now
                    ended.append(index)
            running = self._started(ended, going, now)
        if any(self._queues.values()):
            raise ValueError(self.deadlock())
        return now

    def _started(self, ended: list[int], running: list[int], now: float) -> list[int]:
        """Return what runs on, and the tasks that may start as others have ended."""
        waiting, queue_of = self._waiting, self._queue_of
        candidates: list[int] = []
        for index in ended:
            queue = queue_of[index]
            queue.pop()
            if queue:
                candidates.append(queue[-1])
            for dependent in self._dependents[index]:
                waiting[dependent] -= 1
                candidates.append(dependent)
        for index in candidates:
            # A task may be named twice: by its stream and by what it waited for.
            if not waiting[index] and queue_of[index][-1] == index and index not in running:
                self.starts[index] = now
                running.append(index)
        return running

    def deadlock(self) -> str:
        """Return the tasks at the heads of streams that wait for ever, and their dependencies."""
        heads = [self._tasks[queue[-1]] for queue in self._queues.values() if queue]
        waits = (
            f"{task.name!r} heads {task.stream!r} and waits for {', '.join(map(repr, task.after))}"
            for task in heads
        )
        return "the tasks wait for each other: " + "; ".join(waits)


def _dependents(tasks: Sequence[Task]) -> list[list[int]]:
    """Return for each task the tasks that wait for it."""
    index_of = {task.name: index for index, task in enumerate(tasks)}
    dependents: list[list[int]] = [[] for _ in tasks]
    for index, task in enumerate(tasks):
        for name in task.after:
            dependents[index_of[name]].append(index)
    return dependents
