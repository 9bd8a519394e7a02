"""Times of phases that reuse memory, all of them simulated at once.

Each array operation moves every phase to the next end of one of its tasks. Once the streams stand
to each other as they did one chunk before, every further chunk takes as long as that one did: the
first `FEW` chunks tell the time of any number of them.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moetune.domain.arrays import Floats, as_rows
from moetune.domain.interference import Interference
from moetune.domain.layer import Phase
from moetune.domain.samples import ResourceClass
from moetune.solve.layer.reuse import COPIES, ReusedChunk, reuse_tasks
from moetune.solve.layer.timeline import COMPUTE, LINK, operation_and_chunk

Ints = NDArray[np.int64]
_STREAMS = LINK, COMPUTE, COPIES
_COMPUTE = _STREAMS.index(COMPUTE)
_CLASSES: tuple[tuple[ResourceClass | None, ...], ...] = (
    (None, "comm"), (None, "comp", "mem"), (None, "mem"),
)  # fmt: skip
"""Classes of what each stream may run; None where it is idle."""
_SETS = [*product(*_CLASSES)]
"""Classes that may run at once, one of each stream."""
_WEIGHTS = (6, 2, 1)
"""Of the streams' places in `_CLASSES`, for the index of a set in `_SETS`."""
_EDGE = 3
"""So many chunks at either end wait for other tasks than those between."""
FEW = 8
"""Chunks that are simulated first: the fewest with two between the edges, to compare."""
_MORE = 24
"""Chunks that are simulated where the streams have not settled after `FEW`."""
_NEVER = 2**40
"""Index of no task: what waits for it never runs."""
SAME = 1e-13
"""Share of a chunk's time by which the streams may differ and still stand as one chunk before."""


class ReusedPhases(NamedTuple):
    """Phases with the same tasks in each chunk, n of them.

    Args:
        chunk: seconds of its operations are numbers, or arrays of shape (n,).
        degree: chunks, shape (n,).
        interference: its speeds are numbers, or arrays of shape (n,).
    """

    chunk: ReusedChunk
    phase: Phase
    degree: Ints
    interference: Interference


class _Program(NamedTuple):
    """Tasks of a phase, stream by stream; behind the last of each stream one that never runs.

    Args:
        first: index of each stream's first task, shape (streams,).
        duration: index of each task's seconds in `ReusedChunk.durations`, shape (tasks,).
        place: of its class in the number of a set of classes, shape (tasks,).
        needs: task of each stream that has to be at its head, or behind, shape (streams, tasks).
        is_compared: whether the compute stream is through with a chunk, shape (tasks,).
        step: tasks of a chunk in each stream, shape (streams,).
    """

    first: Ints
    duration: Ints
    place: Ints
    needs: Ints
    is_compared: NDArray[np.bool_]
    step: Ints


def reused_seconds(phases: Sequence[ReusedPhases]) -> list[Floats]:
    """Return the makespans of the phases' `reuse.reuse_tasks`, each of shape (n,)."""
    if not phases:
        return []
    sizes = [len(one.degree) for one in phases]
    degrees = np.concatenate([one.degree for one in phases])
    kinds = np.repeat(np.arange(len(phases)), sizes)
    durations = np.hstack([as_rows(one.chunk.durations, len(one.degree)) for one in phases])
    speeds = np.concatenate([_speeds(one) for one in phases], axis=-1)
    patterns = [(one.chunk.pattern, one.phase) for one in phases]
    seconds = np.full(len(degrees), np.nan)
    for most in (FEW, _MORE, int(degrees.max())):
        left = np.flatnonzero(np.isnan(seconds))
        if len(left):
            chunks = np.minimum(degrees[left], most)
            programs, of_phase = np.unique(kinds[left] * (most + 1) + chunks, return_inverse=True)
            program, first, step = _joined(
                [_program(*patterns[one // (most + 1)], one % (most + 1)) for one in programs]
            )
            run = _Run(program, durations[:, left], speeds[..., left])
            found, settled = run.finish(first[:, of_phase], step[:, of_phase])
            more = degrees[left] - chunks
            seconds[left] = found + np.where(more > 0, more * settled, 0.0)
    return np.split(seconds, np.cumsum(sizes)[:-1])


def _speeds(phases: ReusedPhases) -> Floats:
    """Return the speed of each stream in each of `_SETS`, 1 of an idle one, (streams, sets, n)."""
    found = np.ones((len(_STREAMS), len(_SETS), len(phases.degree)))
    for at, classes in enumerate(_SETS):
        among = frozenset(name for name in classes if name is not None)
        for stream, name in enumerate(classes):
            if name is not None:
                found[stream, at] = phases.interference.speed(name, among)
    return found


@lru_cache(maxsize=1024)
def _program(pattern: ReusedChunk, phase: Phase, num_chunks: int) -> _Program:
    """Return the tasks of `reuse_tasks` in so many chunks."""
    tasks = reuse_tasks(chunk=pattern, phase=phase, degree=num_chunks)
    rows = [[task for task in tasks if task.stream == stream] for stream in _STREAMS]
    first = np.cumsum([0, *(len(row) + 1 for row in rows[:-1])])
    index = {task.name: start + at for start, row in zip(first, rows, strict=True)
             for at, task in enumerate(row)}  # fmt: skip
    duration, place, needs, is_compared = [], [], [], []
    for stream, row in enumerate(rows):
        for task in row:
            duration.append(int(task.seconds))
            place.append(_WEIGHTS[stream] * _CLASSES[stream].index(task.resource))
            ends = [0] * len(_STREAMS)
            for name in task.after:
                at = int(np.searchsorted(first, index[name], "right")) - 1
                ends[at] = max(ends[at], index[name] + 1)
            needs.append(ends)
        is_compared += [False, *(_ends_chunk(task.name, num_chunks) for task in row)]
        duration, place, needs = [*duration, 0], [*place, 0], [*needs, [_NEVER] * len(_STREAMS)]
    return _Program(
        first=first, duration=np.array(duration), place=np.array(place), needs=np.array(needs).T,
        is_compared=np.array(is_compared), step=np.array([len(row) // num_chunks for row in rows]),
    )  # fmt: skip


def _ends_chunk(name: str, num_chunks: int) -> bool:
    """Return whether the experts are through with a chunk between the edges."""
    operation, chunk = operation_and_chunk(name)
    return operation == "after" and chunk is not None and _EDGE <= chunk < num_chunks - _EDGE


def _joined(programs: Sequence[_Program]) -> tuple[_Program, Ints, Ints]:
    """Return the tasks of all programs as one, and the first tasks and the steps of each.

    Returns:
        The latter two of shape (streams, programs).
    """
    starts = np.cumsum([0, *(len(one.duration) for one in programs[:-1])])
    first = np.array([one.first for one in programs]) + starts[:, None]
    step = np.array([one.step for one in programs])
    joined = _Program(
        first=first,
        duration=np.concatenate([one.duration for one in programs]),
        place=np.concatenate([one.place for one in programs]),
        needs=np.hstack([one.needs + at for one, at in zip(programs, starts, strict=True)]),
        is_compared=np.concatenate([one.is_compared for one in programs]),
        step=step,
    )
    return joined, first.T, step.T


class _Run:
    """One simulation of n phases: where their streams are, and what is left of their tasks.

    Args:
        durations: seconds of each phase's operations, shape (operations, n).
        speeds: as of `_speeds`.
    """

    def __init__(self, program: _Program, durations: Floats, speeds: Floats) -> None:
        self._program, self._durations, self._speeds = program, durations, speeds
        self._every = np.arange(durations.shape[1])
        self._streams = np.arange(len(_STREAMS))[:, None]

    def finish(self, head: Ints, step: Ints) -> tuple[Floats, Floats]:
        """Run all tasks.

        Args:
            head: each stream's first task, shape (streams, n).
            step: tasks of a chunk in each stream, of the same shape.

        Returns:
            When the last task of each phase ends, and the seconds of a chunk once its streams have
            settled, NaN where they have not; both of shape (n,).
        """
        now, settled = np.zeros(len(self._every)), np.full(len(self._every), np.nan)
        left = self._whole(head)
        before: tuple[Floats, Ints, Floats] = np.full_like(now, np.nan), head, left
        while True:
            running = (head[:, None] >= self._program.needs[:, head]).all(axis=0)
            is_going = running.any(axis=0)
            if not is_going.any():
                return now, settled
            sets = np.where(running, self._program.place[head], 0).sum(axis=0)
            speeds = self._speeds[self._streams, sets, self._every]
            times = np.where(running, left / speeds, np.inf)
            seconds = np.where(is_going, times.min(axis=0), 0.0)
            now = now + seconds
            is_ended = times <= seconds
            head = head + is_ended
            left = np.where(running, left - seconds * speeds, left)
            left = np.where(is_ended, self._whole(head), left)
            is_compared = self._program.is_compared[head[_COMPUTE]] & is_ended[_COMPUTE]
            if is_compared.any():
                then, heads, lefts = before
                chunk = now - then
                apart = np.abs(left - lefts).max(axis=0)
                is_same = (head - heads == step).all(axis=0) & (apart <= SAME * chunk)
                settled = np.where(is_compared & is_same & np.isnan(settled), chunk, settled)
                before = (
                    np.where(is_compared, now, then), np.where(is_compared, head, heads),
                    np.where(is_compared, left, lefts),
                )  # fmt: skip

    def _whole(self, head: Ints) -> Floats:
        """Return the seconds of the tasks at the heads of the streams."""
        found: Floats = self._durations[self._program.duration[head], self._every]
        return found
