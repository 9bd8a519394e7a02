"""Tasks of phases that reuse memory as numbers: what `many_phases` runs.

Once the streams stand to each other as they did one chunk before, every further chunk takes as long
as that one did, so that the first `FEW` chunks tell the time of any number of them.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moetune.domain.costs import Estimate
from moetune.domain.samples import ResourceClass
from moetune.solve.layer.reuse import COPIES, ChunkKind, ReusedChunk, reuse_tasks
from moetune.solve.layer.timeline import COMPUTE, LINK, operation_and_chunk

STREAMS = LINK, COMPUTE, COPIES
CODES: tuple[tuple[ResourceClass, ...], ...] = (("comm",), ("comp", "mem"), ("mem",))
"""Classes of each stream's tasks, in the order of their codes; 0 is no task."""
WEIGHTS = (1, 2, 6)
"""Of the streams' codes in the number of a set of classes that run at once."""
EDGE = 3
"""So many chunks at either end wait for other tasks than those between."""
FEW = 8
"""Chunks that are simulated first: the fewest with two between the edges, to compare."""
COUNT_BITS = 20
"""Of each stream's number of tasks, where one integer has the numbers of all streams."""
GUARD = sum(1 << COUNT_BITS * (stream + 1) - 1 for stream in range(len(STREAMS)))
"""Highest bit of each stream's number: a difference of numbers that is negative clears it."""
NEVER = (1 << COUNT_BITS - 1) - 1
"""More tasks than there are: what waits for them never runs."""

Ints = NDArray[np.int64]
_INDICES = [Estimate(seconds=float(index), trust="measured") for index in range(5)]
"""In the place of the durations of a chunk's operations."""


class Program(NamedTuple):
    """Tasks of a phase, stream by stream; behind the last of each stream one that never runs.

    Args:
        first: index of each stream's first task, shape (streams,).
        steps: of each task the index of its duration in `Durations`; its class, times the stream's
            weight; how many tasks of each stream end before it starts, one number; and whether the
            streams are compared with a chunk before as it becomes the next one of the compute
            stream; shape (4, tasks).
        each: tasks of a chunk in each stream, shape (streams,).
    """

    first: Ints
    steps: Ints
    each: Ints


@lru_cache(maxsize=1024)
def program(kind: ChunkKind, degree: int) -> Program:
    """Return the tasks of `reuse_tasks` in so many chunks."""
    tasks = reuse_tasks(chunk=_chunk_of_indices(kind), phase=kind.phase, degree=degree)
    counts = dict.fromkeys(STREAMS, 0)
    places: dict[str, tuple[int, int]] = {}
    for task in tasks:
        counts[task.stream] += 1
        places[task.name] = STREAMS.index(task.stream), counts[task.stream]
    steps: dict[str, list[tuple[int, int, int, bool]]] = {stream: [] for stream in STREAMS}
    is_compared = False
    for task in tasks:
        at = STREAMS.index(task.stream)
        needs = [0] * len(STREAMS)
        for stream, number in map(places.__getitem__, task.after):
            needs[stream] = max(needs[stream], number)
        packed = sum(number << COUNT_BITS * stream for stream, number in enumerate(needs))
        code = WEIGHTS[at] * (CODES[at].index(task.resource) + 1)
        compares = task.stream == COMPUTE and is_compared
        steps[task.stream].append((int(task.seconds), code, packed, compares))
        if task.stream == COMPUTE:
            is_compared = _is_compared_behind(task.name, degree)
    rows = [
        [*some, (0, 0, NEVER, some is steps[COMPUTE] and is_compared)] for some in steps.values()
    ]
    lengths = [len(row) for row in rows]
    return Program(
        first=np.cumsum([0, *lengths[:-1]]),
        steps=np.array([step for row in rows for step in row]).T,
        each=np.array([(length - 1) // degree for length in lengths]),
    )


def _is_compared_behind(name: str, degree: int) -> bool:
    """Return whether the experts are through with a chunk between the edges."""
    operation, chunk = operation_and_chunk(name)
    return operation == "after" and chunk is not None and EDGE <= chunk < degree - EDGE


def _chunk_of_indices(kind: ChunkKind) -> ReusedChunk:
    """Return a chunk whose operations take the indices of their durations, in seconds."""
    transfer, before, after, copy_input, copy_middle = _INDICES
    return ReusedChunk(
        transfer=transfer, before=before, after=after,
        copy_input=copy_input if kind.copies_input else None,
        copy_middle=copy_middle if kind.copies_middle else None,
        sends_again=kind.sends_again, copies_overlap=kind.copies_overlap,
        sorts_rows=kind.sorts_rows,
    )  # fmt: skip
