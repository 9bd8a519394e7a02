"""Tasks of phases that reuse memory as arrays, in every number of chunks at once.

A phase in fewer chunks has the tasks of those chunks alone, in the same order and behind the same
ones. Its last chunk alone waits for less: no dispatch follows it. So all of them come from the
tasks of the most chunks.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from moetune.domain.samples import ResourceClass
from moetune.solve.layer.phase_arrays import Bools, Ints
from moetune.solve.layer.reuse import ChunkKind, reuse_tasks
from moetune.solve.layer.steady import COUNT_BITS, EDGE, FEW, NEVER, STREAMS, chunk_of_indices
from moetune.solve.layer.timeline import Task, operation_and_chunk

CODES: tuple[tuple[ResourceClass, ...], ...] = (("comm",), ("comp", "mem"), ("mem",))
"""Classes of each stream's tasks, in the order of their codes; 0 is no task."""
WEIGHTS = (1, 2, 6)
"""Of the streams' codes in the number of a set of classes that run at once."""
_CODE_OF = {
    (stream, name): weight * code
    for stream, names, weight in zip(STREAMS, CODES, WEIGHTS, strict=True)
    for code, name in enumerate(names, 1)
}
_NO_CHUNK = -1
_NEVER_RUNS = Task("", "comm", "", 0.0)
"""Stands behind the last task of each stream."""
_SAVED = "save input"


class Programs(NamedTuple):
    """Tasks of a phase in several numbers of chunks, stream by stream.

    Behind the last task of each stream stands one that never runs.

    Args:
        fewest: of these numbers of chunks, each of which is one more than that before.
        first: index of each stream's first task, shape (numbers, streams).
        steps: of each task the index of its duration; its class, times the stream's weight; how
            many tasks of each stream end before it starts, one number; and whether the streams are
            compared with a chunk before as it becomes the next one of the compute stream; shape
            (4, tasks).
        each: tasks of a chunk in each stream.
    """

    fewest: int
    first: Ints
    steps: Ints
    each: Ints


def programs_with(kind: ChunkKind, num_chunks: int) -> Programs:
    """Return programs, one of which is that of so many chunks."""
    return _programs(kind, 1 if num_chunks <= FEW else num_chunks, max(num_chunks, FEW))


@lru_cache(maxsize=256)
def _programs(kind: ChunkKind, fewest: int, most: int) -> Programs:
    longest = _Longest(reuse_tasks(chunk=chunk_of_indices(kind), phase=kind.phase, degree=most))
    return longest.in_chunks(np.arange(fewest, most + 1)[:, None])


class _Longest:
    """The tasks of the most chunks, stream by stream, each stream's last one never running."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        by_stream = [[task for task in tasks if task.stream == one] for one in STREAMS]
        rows = [task for stream in by_stream for task in [*stream, _NEVER_RUNS]]
        names, chunks = zip(*(operation_and_chunk(task.name) for task in rows), strict=True)
        ends = np.cumsum([len(stream) + 1 for stream in by_stream])
        self._chunk = np.array([_NO_CHUNK if chunk is None else chunk for chunk in chunks])
        self._runs = self._chunk != _NO_CHUNK
        self._each = np.array([len(stream) for stream in by_stream]) // (self._chunk.max() + 1)
        self._starts = np.array([0, *ends[:-1]])
        self._stream = np.repeat(range(len(STREAMS)), np.diff(ends, prepend=0))
        self._duration = [int(task.seconds) for task in rows]
        self._code = [_CODE_OF[task.stream, task.resource] if task.stream else 0 for task in rows]
        is_after = np.array(["", *names[:-1]]) == "after"
        self._experts_of = np.where(is_after, np.append(_NO_CHUNK, self._chunk[:-1]), _NO_CHUNK)
        usual = [task.after for task in rows]
        last = [_after_in_last_chunk(task) for task in rows]
        at = {task.name: place for place, task in enumerate(rows)}
        streams = self._stream.tolist()
        self._needs = _last_needed(usual, streams, at)
        self._needs_of_last = self._needs if last == usual else _last_needed(last, streams, at)

    def in_chunks(self, degrees: Ints) -> Programs:
        """Return the tasks of the first chunks, as they are without the others.

        Args:
            degrees: shape (numbers, 1).
        """
        kept = self._chunk < degrees
        ended = self._num_ended(kept & self._runs)
        numbers = np.arange(len(degrees))[:, None]
        packed = np.zeros(kept.shape, np.int64)
        for stream in range(len(STREAMS)):
            needs = np.where(
                self._chunk == degrees - 1, self._needs_of_last[stream], self._needs[stream]
            )
            packed += ended[numbers, needs] << COUNT_BITS * stream
        packed[:, ~self._runs] = NEVER
        compares = (self._experts_of >= EDGE) & (self._experts_of < degrees - EDGE)
        every = np.broadcast_arrays(self._duration, self._code, packed, compares)
        lengths = np.add.reduceat(kept, self._starts, axis=1, dtype=np.int64).ravel()
        return Programs(
            fewest=int(degrees[0, 0]),
            first=(np.cumsum(lengths) - lengths).reshape(-1, len(STREAMS)),
            steps=np.array([one[kept] for one in every]),
            each=self._each,
        )

    def _num_ended(self, runs: Bools) -> Ints:
        """Return how many tasks of its stream have ended with each one, and 0 for no task."""
        ended = np.cumsum(runs, axis=1)
        before = np.where(self._starts > 0, ended[:, self._starts - 1], 0)
        none = np.zeros((len(runs), 1), np.int64)
        return np.hstack([ended - before[:, self._stream], none])


def _last_needed(
    needs: Sequence[Sequence[str]], streams: Sequence[int], at: Mapping[str, int]
) -> Sequence[Ints]:
    """Return the index of the last task of each stream that each task waits for.

    Without any, the index behind all.
    """
    found = [[len(streams)] * len(streams) for _ in STREAMS]
    for place, names in enumerate(needs):
        for name in names:
            needed = at[name]
            of_stream = found[streams[needed]]
            if of_stream[place] == len(streams) or of_stream[place] < needed:
                of_stream[place] = needed
    return [np.array(one) for one in found]


def _after_in_last_chunk(task: Task) -> tuple[str, ...]:
    """Return what the task waits for in the last chunk, which no dispatch follows."""
    if not task.name.startswith("before"):
        return task.after
    return tuple(one for one in task.after if not one.startswith(_SAVED))
