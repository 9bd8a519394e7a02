"""Timeline of a phase whose chunks share buffers, for each memory strategy.

Reused memory overwrites activations that the backward pass needs (MPipeMoE §III-D). The rows that
the experts received (T_DI) come back from host memory (S1, S3) or are sent again (S2, S4); the
pre-activations (T_M) come back from host memory (S1, S2) or are computed again (S3, S4).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moetune.domain.arrays import Floats, Ints, Sizes
from moetune.domain.constraints import OFFLOADS_INPUT, OFFLOADS_MIDDLE, Strategy
from moetune.domain.cost_keys import CopyKey
from moetune.domain.costs import scaled
from moetune.domain.interference import SpeedTable
from moetune.domain.layer import Phase
from moetune.domain.samples import Direction
from moetune.domain.units import dtype_bytes
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.operations import NOTHING, Price
from moetune.solve.layer.peak import middle_elements
from moetune.solve.layer.timeline import (
    COMPUTE,
    COPIES,
    LINK,
    STREAMS,
    Program,
    Task,
    events,
    program_of,
    stream_speeds,
)

_AHEAD = 2
"""Dispatches ahead of the experts: T_DI has two buffers."""
_EDGE = 3
"""Chunks at either end that wait for other tasks than the chunks between."""
FEW = 8
"""Chunks that are simulated first: the fewest that leave two between the edges to compare."""
_MORE = 24
"""Chunks that are simulated if the streams have not settled after `FEW`."""
SAME = 1e-13
"""Share of a chunk's time by which streams may differ between chunks and count as settled."""
_TRANSFER, _BEFORE, _AFTER, _COPY_INPUT, _COPY_MIDDLE = range(5)
"""Rows of a chunk's `durations`; tasks of a pattern hold such a row in place of seconds."""


class ChunkPattern(NamedTuple):
    """The operations that a chunk has, without their times.

    Args:
        copies_input, copies_middle: whether T_DI and T_M go to the host, or come back.
        sends_again: whether T_DI is dispatched a second time.
        copies_overlap: whether an engine copies while the experts compute.
        sorts_rows: whether T_DI is sorted by expert into a third buffer, after the link's two.
    """

    copies_input: bool
    copies_middle: bool
    sends_again: bool
    copies_overlap: bool
    sorts_rows: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusedChunk:
    """One chunk's operations while nothing else runs.

    Args:
        transfer: a dispatch, or a combine.
        before: the experts' work up to the last use of T_M.
        after: the rest of the experts' work, during which T_M may be overwritten.
        copy_input, copy_middle: copies of T_DI and T_M to the host, or back; 0 without copies.
    """

    pattern: ChunkPattern
    transfer: Price
    before: Price
    after: Price
    copy_input: Price = NOTHING
    copy_middle: Price = NOTHING

    @property
    def durations(self) -> list[Floats]:
        """Seconds of the transfer, of the experts' halves, and of both copies."""
        operations = self.transfer, self.before, self.after, self.copy_input, self.copy_middle
        return [operation.seconds for operation in operations]


def chunk_of(
    *, costs: LayerCosts, phase: Phase, strategy: Strategy, rows: Sizes, degree: Sizes
) -> ReusedChunk:
    """Return the costs of one of `degree` chunks; ProfileError if copies were not measured."""
    before, after = costs.halves(phase, rows, recompute=strategy in {"S3", "S4"})
    layer, mode = costs.layer, costs.costs.copy_mode
    way: Direction = "d2h" if phase == "forward" else "h2d"
    factor = costs.step_factor(rows=rows, degree=degree)

    def copy(width: int) -> Price:
        num_bytes = rows * width * dtype_bytes(costs.dtype)
        copied = scaled(costs.price(CopyKey(way, mode != "pageable"), num_bytes), factor)
        return copied._replace(trust="modelled") if mode == "pageable" else copied

    pattern = ChunkPattern(
        copies_input=strategy in OFFLOADS_INPUT,
        copies_middle=strategy in OFFLOADS_MIDDLE,
        sends_again=phase == "backward" and strategy in {"S2", "S4"},
        copies_overlap=mode == "pinned",
        sorts_rows=costs.sorts_rows,
    )
    return ReusedChunk(
        pattern=pattern,
        transfer=scaled(costs.transfer(rows=rows, degree=degree), factor),
        before=scaled(before, factor),
        after=scaled(after, factor),
        copy_input=copy(layer.d_model) if pattern.copies_input else NOTHING,
        copy_middle=copy(middle_elements(layer)) if pattern.copies_middle else NOTHING,
    )


def reuse_tasks(*, chunk: ReusedChunk, phase: Phase, degree: int) -> list[Task]:
    """Return the tasks of a phase, two dispatches ahead of the experts (MPipeMoE Fig. 7).

    Backward the link runs D₁ D₂ C₁ D₃ C₂ … as in the paper, with each D twice if T_DI is sent
    again. Forward it runs D₁ D₂ D₃ C₁ D₄ C₂ …, with D₃ once the first chunk's experts have left its
    buffer. The experts then wait for D₃ and not for C₁, which saves up to 12 % if t_d < t_e <
    2·t_d. Backward that would need a fourth buffer of gradients, up to 3 % over the bound of Eq. 6.
    """
    durations = [seconds.item() for seconds in chunk.durations]
    tasks = _tasks(chunk.pattern, phase, degree)
    return [task._replace(seconds=durations[int(task.seconds)]) for task in tasks]


def _tasks(pattern: ChunkPattern, phase: Phase, degree: int) -> list[Task]:
    is_forward, chunks = phase == "forward", range(degree)
    ahead, dispatch = (_AHEAD, _dispatch) if is_forward else (1, _dispatch_backward)
    link = [task for i in chunks[:ahead] for task in dispatch(pattern, i)]
    for i in chunks:
        link += dispatch(pattern, i + ahead) if i + ahead < degree else ()
        link.append(Task(f"combine {i}", "comm", LINK, _TRANSFER, (f"after {i}",)))
    experts = [] if is_forward else [*_first_loads(pattern, degree)]
    compute = _forward if is_forward else _backward
    return [*link, *experts, *(task for i in chunks for task in compute(pattern, i, degree))]


def _dispatch(pattern: ChunkPattern, i: int) -> Iterator[Task]:
    """Yield a dispatch, which waits until its buffer of received rows is free."""
    before, saves = i - _AHEAD, pattern.copies_input and not pattern.sorts_rows
    after = (f"after {before}", f"save input {before}")[: 1 + saves] if before >= 0 else ()
    yield Task(f"dispatch {i}", "comm", LINK, _TRANSFER, after)


def _dispatch_backward(pattern: ChunkPattern, i: int) -> Iterator[Task]:
    if pattern.sends_again:
        yield Task(f"dispatch again {i}", "comm", LINK, _TRANSFER)
    yield Task(f"dispatch {i}", "comm", LINK, _TRANSFER)


def _forward(pattern: ChunkPattern, i: int, degree: int) -> Iterator[Task]:
    arrived = (f"dispatch {i}",)
    before = list(arrived)
    after = [f"combine {i - _AHEAD}"] if i >= _AHEAD else []  # T_DO also has two buffers
    if pattern.copies_input:
        idle = (f"after {i - 1}",) if i else ()
        yield _copying(pattern, f"save input {i}", _COPY_INPUT, (*arrived, *idle))
        after += [f"save input {i}"] if pattern.sorts_rows else []
    if pattern.copies_middle and i:
        before.append(f"save middle {i - 1}")
    if pattern.copies_input and not pattern.sorts_rows and 0 < i < degree - 1:
        before.append(f"save input {i - 1}")  # the next dispatch, ahead of C, waits for it
    yield Task(f"before {i}", "comp", COMPUTE, _BEFORE, tuple(before))
    if pattern.copies_middle:
        yield _copying(pattern, f"save middle {i}", _COPY_MIDDLE, (f"before {i}",))
    yield Task(f"after {i}", "comp", COMPUTE, _AFTER, tuple(after))


def _first_loads(pattern: ChunkPattern, degree: int) -> Iterator[Task]:
    if pattern.copies_input:
        yield _copying(pattern, "load input 0", _COPY_INPUT)
    if pattern.copies_middle:
        yield _copying(pattern, "load middle 0", _COPY_MIDDLE)
    if pattern.copies_input and degree > 1:
        yield _copying(pattern, "load input 1", _COPY_INPUT)


def _backward(pattern: ChunkPattern, i: int, degree: int) -> Iterator[Task]:
    """Yield a chunk's experts, and the loads of later chunks as buffers become free."""
    needed = [f"dispatch {i}"]
    needed += [f"load input {i}"] if pattern.copies_input else []
    needed += [f"load middle {i}"] if pattern.copies_middle else []
    yield Task(f"before {i}", "comp", COMPUTE, _BEFORE, tuple(needed))
    if pattern.copies_middle and i + 1 < degree:
        yield _copying(pattern, f"load middle {i + 1}", _COPY_MIDDLE, (f"before {i}",))
    yield Task(f"after {i}", "comp", COMPUTE, _AFTER)
    if pattern.copies_input and i + _AHEAD < degree:
        yield _copying(pattern, f"load input {i + _AHEAD}", _COPY_INPUT, (f"after {i}",))


def _copying(pattern: ChunkPattern, name: str, copy: int, after: Sequence[str] = ()) -> Task:
    stream = COPIES if pattern.copies_overlap else COMPUTE
    return Task(name, "mem", stream, copy, tuple(after))


def reused_seconds(
    *, chunk: ReusedChunk, phase: Phase, degrees: Ints, speeds: SpeedTable
) -> Floats:
    """Return the makespans of `reuse_tasks` for n numbers of chunks.

    After some chunks the streams settle: each further chunk takes as long as the chunk before it.
    So the first `FEW` chunks determine the time of any number of chunks.

    Args:
        chunk: its operations have seconds without dimensions, or of shape (n,).
        degrees: numbers of chunks, shape (n,).
        speeds: without dimensions, or of shape (n,).

    Raises:
        ArithmeticError: a duration is negative or not finite.
    """
    num = len(degrees)
    durations = np.array([np.broadcast_to(row, num) for row in chunk.durations])
    if not (np.isfinite(durations).all() and (durations >= 0).all()):
        raise ArithmeticError("the times of a chunk are negative, or no finite numbers")
    of_streams, seconds = stream_speeds(speeds, num), np.full(num, np.nan)
    for most in (FEW, _MORE, int(degrees.max())):
        left = np.flatnonzero(np.isnan(seconds))
        if len(left):
            simulated = np.minimum(degrees[left], most)
            numbers, numbers_of = np.unique(simulated, return_inverse=True)
            chunks = _chunks(chunk.pattern, phase, tuple(numbers.tolist()))
            makespans, settled = _run(chunks, numbers_of, durations[:, left], of_streams[..., left])
            more = degrees[left] - simulated
            seconds[left] = makespans + np.where(more > 0, more * settled, 0.0)
    return seconds


class _Chunks(NamedTuple):
    """The program of a phase for several numbers of chunks.

    Args:
        ends_chunk: whether a task is the last of the experts in a chunk between the edges.
        step: tasks of a chunk in each stream, shape (streams,).
    """

    program: Program
    ends_chunk: NDArray[np.bool_]
    step: Ints


@lru_cache(maxsize=1024)
def _chunks(pattern: ChunkPattern, phase: Phase, numbers: tuple[int, ...]) -> _Chunks:
    """Return the program of `reuse_tasks` for each of the numbers of chunks."""
    phases = [_tasks(pattern, phase, number) for number in numbers]
    program, tasks = program_of(phases), phases[0]
    inner = {(f"after {i}", number) for number in numbers for i in range(_EDGE, number - _EDGE)}
    numbers_of = (number for number, tasks in zip(numbers, phases, strict=True)
                  for _ in range(len(tasks) + len(STREAMS)))  # fmt: skip
    ends_chunk = [place in inner for place in zip(program.names, numbers_of, strict=True)]
    step = [sum(task.stream == stream for task in tasks) // numbers[0] for stream in STREAMS]
    return _Chunks(program, np.array(ends_chunk), np.array(step))


def _run(
    chunks: _Chunks, numbers_of: Ints, durations: Floats, speeds: Floats
) -> tuple[Floats, Floats]:
    """Run n phases, each with its number of chunks.

    Returns:
        The end of each phase's last task, and the seconds of a chunk once its streams have settled
        (NaN if they have not); both of shape (n,).
    """
    program, step = chunks.program, chunks.step[:, None]
    head = program.first[:, numbers_of]
    compute = STREAMS.index(COMPUTE)
    now = then = np.zeros(len(numbers_of))
    settled = np.full_like(now, np.nan)
    heads, lefts = np.full_like(head, -1), np.zeros(head.shape)
    for event in events(program, head, durations, speeds):
        now = event.now
        is_compared = chunks.ends_chunk[event.head[compute]] & event.is_ended[compute]
        if is_compared.any():
            head, chunk = event.head + event.is_ended, now - then
            difference = np.abs(event.left - lefts).max(axis=0)
            is_same = (head - heads == step).all(axis=0) & (difference <= SAME * chunk)
            settled = np.where(is_compared & is_same & np.isnan(settled), chunk, settled)
            then = np.where(is_compared, now, then)
            heads, lefts = (
                np.where(is_compared, head, heads),
                np.where(is_compared, event.left, lefts),
            )
    return now, settled
