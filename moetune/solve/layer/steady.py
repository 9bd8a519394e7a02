"""Time of a phase that reuses memory, from the few chunks after which all others are alike.

Once the streams stand to each other as they did one chunk before, every further chunk takes as long
as that one did. `timeline.simulate` runs all chunks, and tests hold the two together.
"""

import math
from functools import lru_cache
from typing import NamedTuple

from moetune.domain.costs import Estimate
from moetune.domain.interference import Interference
from moetune.domain.samples import ResourceClass
from moetune.solve.layer.reuse import COPIES, ChunkKind, Durations, ReusedChunk, reuse_tasks
from moetune.solve.layer.timeline import COMPUTE, LINK

STREAMS = LINK, COMPUTE, COPIES
_ALL = range(len(STREAMS))
_COMPUTE = STREAMS.index(COMPUTE)
_CLASSES: tuple[ResourceClass, ...] = ("comm", "comp", "mem")
_BITS = 2
_CLASS_BITS = {
    (stream, name): number + 1 << _BITS * place
    for place, stream in enumerate(STREAMS)
    for number, name in enumerate(_CLASSES)
}
EDGE = 3
"""So many chunks at either end wait for other tasks than those between."""
FEW = 8
"""Chunks that are simulated first: the fewest with two between the edges, to compare."""
SAME = 1e-13
"""Share of a chunk's time by which the streams may differ and still stand as one chunk before."""


COUNT_BITS = 20
"""Of each stream's number of tasks, where one integer has the numbers of all streams."""
_ONES = [1 << COUNT_BITS * stream for stream in _ALL]
GUARD = sum(1 << COUNT_BITS * (stream + 1) - 1 for stream in _ALL)
"""Highest bit of each stream's number: a difference of numbers that is negative clears it."""


Step = tuple[int, int, int]
"""A task of a stream: index of its duration in `Durations`; its class, in the bits of its stream;
and how many tasks of each stream end before it starts, one integer. A plan has thousands."""
NEVER = (1 << COUNT_BITS - 1) - 1
"""More tasks than there are: what waits for them never runs."""
_LAST: Step = (0, 0, NEVER)
"""Stands behind the last task of each stream."""
_INDICES = [Estimate(seconds=float(index), trust="measured") for index in range(5)]
"""In the place of the durations of a chunk's operations."""


class Program(NamedTuple):
    """The tasks of each stream in their order.

    Args:
        each: tasks of a chunk in each stream.
        ended_chunk: the chunk that the experts are through with after so many tasks.
    """

    streams: tuple[tuple[Step, ...], ...]
    each: tuple[int, ...]
    ended_chunk: dict[int, int]


def reused_seconds(
    kind: ChunkKind, durations: Durations, *, degree: int, interference: Interference
) -> float:
    """Return the makespan of a phase's `reuse_tasks`.

    Raises:
        ValueError: a duration is negative or not finite.
    """
    if not all(0 <= seconds < math.inf for seconds in durations):
        raise ValueError(f"a task must take 0 or more seconds, got {durations}")
    run = Run(program(kind, min(degree, FEW)), durations, interference)
    seconds = run.finish()
    if degree > FEW and run.settled_seconds is None:
        return Run(program(kind, degree), durations, interference).finish()
    return seconds + max(0, degree - FEW) * (run.settled_seconds or 0.0)


@lru_cache(maxsize=1024)
def program(kind: ChunkKind, degree: int) -> Program:
    """Return the tasks of `reuse_tasks` as numbers; their durations are indices meanwhile."""
    tasks = reuse_tasks(chunk=chunk_of_indices(kind), phase=kind.phase, degree=degree)
    ones = dict(zip(STREAMS, _ONES, strict=True))
    counts = dict.fromkeys(STREAMS, 0)
    places: dict[str, int] = {}
    for name, _, stream, _, _ in tasks:
        counts[stream] += ones[stream]
        places[name] = counts[stream]
    streams: dict[str, list[Step]] = {stream: [] for stream in STREAMS}
    for _, resource, stream, seconds, names in tasks:
        needs = 0
        for name in names:
            needs = _more(needs, places[name]) if needs else places[name]
        streams[stream].append((int(seconds), _CLASS_BITS[stream, resource], needs))
    return Program(
        streams=tuple((*steps, _LAST) for steps in streams.values()),
        each=tuple(len(steps) // degree for steps in streams.values()),
        ended_chunk={places[f"after {chunk}"] // ones[COMPUTE]: chunk for chunk in range(degree)},
    )


def chunk_of_indices(kind: ChunkKind) -> ReusedChunk:
    """Return a chunk whose operations take the indices of their durations, in seconds."""
    transfer, before, after, copy_input, copy_middle = _INDICES
    return ReusedChunk(
        transfer=transfer, before=before, after=after,
        copy_input=copy_input if kind.copies_input else None,
        copy_middle=copy_middle if kind.copies_middle else None,
        sends_again=kind.sends_again, copies_overlap=kind.copies_overlap,
        sorts_rows=kind.sorts_rows,
    )  # fmt: skip


def _more(one: int, other: int) -> int:
    """Return the larger number of each stream's tasks."""
    less = ((other | GUARD) - one) & GUARD  # the highest bit of those of which the other has more
    mask = (less << 1) - (less >> COUNT_BITS - 1)
    return one & ~mask | other & mask


class Run:
    """One simulation of a program.

    Attributes:
        settled_seconds: of each chunk, once the streams have settled; None before.
    """

    def __init__(self, program: Program, durations: Durations, interference: Interference) -> None:
        self._program = program
        self._durations = durations
        self._interference = interference
        self._speeds: dict[int, tuple[float, ...]] = {}
        self._last: tuple[float, list[int], list[float]] | None = None
        self.settled_seconds: float | None = None

    def finish(self) -> float:
        """Run all tasks and return when the last one ends."""
        durations, streams = self._durations, self._program.streams
        ended, num_ended, heads = [0, 0, 0], GUARD, [steps[0] for steps in streams]
        left = [durations[head[0]] for head in heads]
        now, times = 0.0, [0.0, 0.0, 0.0]
        while True:
            before = ended[_COMPUTE]
            running, classes = [], 0
            for stream in _ALL:
                _, bits, needs = heads[stream]
                if num_ended - needs & GUARD == GUARD:
                    running.append(stream)
                    classes |= bits
            if not running:
                return now
            speeds = self._speeds.get(classes) or self._speeds_of(classes, running, heads)
            for stream in running:
                times[stream] = left[stream] / speeds[stream]
            step = min([times[stream] for stream in running])
            now += step
            for stream in running:
                if times[stream] > step:
                    left[stream] -= step * speeds[stream]
                else:
                    ended[stream] += 1
                    num_ended += _ONES[stream]
                    heads[stream] = head = streams[stream][ended[stream]]
                    left[stream] = durations[head[0]]
            if ended[_COMPUTE] > before and self.settled_seconds is None:
                self._compare(now, ended, left)

    def _speeds_of(self, classes: int, running: list[int], heads: list[Step]) -> tuple[float, ...]:
        """Return the speed of each stream while these classes run."""
        names: list[ResourceClass | None] = [None] * len(STREAMS)
        for stream in running:
            names[stream] = _CLASSES[(heads[stream][1] >> _BITS * stream) - 1]
        among = frozenset(name for name in names if name is not None)
        found = self._speeds[classes] = tuple(
            1.0 if name is None else self._interference.speed(name, among) for name in names
        )
        return found

    def _compare(self, now: float, ended: list[int], left: list[float]) -> None:
        """Compare the streams, as the experts are through with a chunk, with a chunk before."""
        program = self._program
        chunk = program.ended_chunk.get(ended[_COMPUTE])
        if chunk is None or not EDGE <= chunk < len(program.ended_chunk) - EDGE:
            return
        if self._last is not None:
            before, then, had = self._last
            seconds = now - before
            moved = tuple(a - b for a, b in zip(ended, then, strict=True))
            apart = max(abs(a - b) for a, b in zip(left, had, strict=True))
            if moved == program.each and apart <= SAME * seconds:
                self.settled_seconds = seconds
        self._last = now, [*ended], [*left]
