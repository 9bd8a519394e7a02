"""Timeline of a phase whose chunks share buffers, for each memory strategy.

Reused memory overwrites activations that the backward pass needs (MPipeMoE §III-D). The rows that
the experts received (T_DI) come back from host memory (S1, S3) or are sent again (S2, S4); the
pre-activations (T_M) come back from host memory (S1, S2) or are computed again (S3, S4).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moetune.domain.arrays import Floats, as_rows
from moetune.domain.constraints import OFFLOADS_INPUT, OFFLOADS_MIDDLE, Strategy
from moetune.domain.cost_keys import CopyKey
from moetune.domain.costs import Estimate
from moetune.domain.interference import Interference
from moetune.domain.layer import Phase
from moetune.domain.samples import Direction
from moetune.domain.units import dtype_bytes
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.operations import total
from moetune.solve.layer.peak import middle_elements
from moetune.solve.layer.timeline import (
    COMPUTE,
    COPIES,
    LINK,
    STREAMS,
    Ints,
    Program,
    Task,
    events,
    program_of,
    speeds_of,
)

_AHEAD = 2
"""Dispatches ahead of the experts: T_DI has two buffers."""
_EDGE = 3
"""So many chunks at either end wait for other tasks than those between."""
FEW = 8
"""Chunks that are simulated first: the fewest with two between the edges, to compare."""
_MORE = 24
"""Chunks that are simulated where the streams have not settled after `FEW`."""
SAME = 1e-13
"""Share of a chunk's time by which the streams may differ and still stand as one chunk before."""
_INDICES = [Estimate(seconds=float(index), trust="measured") for index in range(5)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusedChunk:
    """One chunk's operations while nothing else runs.

    Args:
        transfer: a dispatch, or a combine.
        before: the experts' work up to the last use of T_M.
        after: the rest of the experts' work, during which T_M may be overwritten.
        copy_input, copy_middle: T_DI and T_M to the host, or back.
        sends_again: whether T_DI is dispatched a second time.
        copies_overlap: whether an engine copies while the experts compute.
        sorts_rows: whether T_DI is sorted by expert into a third buffer, after the link's two.
    """

    transfer: Estimate
    before: Estimate
    after: Estimate
    copy_input: Estimate | None
    copy_middle: Estimate | None
    sends_again: bool
    copies_overlap: bool
    sorts_rows: bool

    @property
    def num_transfers(self) -> int:
        """Exchanges of the chunk: dispatch and combine, and T_DI again."""
        return 3 if self.sends_again else 2

    @property
    def compute(self) -> Estimate:
        """All of the experts' work."""
        return total(self.before, self.after)

    @property
    def copies(self) -> Estimate:
        """All copies."""
        return total(self.copy_input, self.copy_middle)

    @property
    def durations(self) -> list[float]:
        """Seconds of the transfer, of the experts' halves, and of both copies; 0 for no copy."""
        operations = self.transfer, self.before, self.after, self.copy_input, self.copy_middle
        return [0.0 if operation is None else operation.seconds for operation in operations]

    @property
    def pattern(self) -> "ReusedChunk":
        """The chunk with the indices of `durations` as seconds: equal where only those differ."""
        transfer, before, after, copy_input, copy_middle = _INDICES
        return replace(
            self, transfer=transfer, before=before, after=after,
            copy_input=None if self.copy_input is None else copy_input,
            copy_middle=None if self.copy_middle is None else copy_middle,
        )  # fmt: skip


def chunk_of(
    *, costs: LayerCosts, phase: Phase, strategy: Strategy, rows: float, degree: int
) -> ReusedChunk:
    """Return the costs of one of so many chunks; ProfileError where copies were not measured."""
    before, after = costs.halves(phase, rows, recompute=strategy in {"S3", "S4"})
    layer, mode = costs.layer, costs.costs.copy_mode
    way: Direction = "d2h" if phase == "forward" else "h2d"
    factor = costs.step_factor(rows=rows, degree=degree)

    def copy(width: int) -> Estimate:
        num_bytes = rows * width * dtype_bytes(costs.dtype)
        copied = costs.costs.seconds(CopyKey(way, mode != "pageable"), num_bytes).scaled(factor)
        return copied._replace(trust="modelled") if mode == "pageable" else copied

    return ReusedChunk(
        transfer=costs.transfer(rows=rows, degree=degree).scaled(factor),
        before=before.scaled(factor),
        after=after.scaled(factor),
        copy_input=copy(layer.d_model) if strategy in OFFLOADS_INPUT else None,
        copy_middle=copy(middle_elements(layer)) if strategy in OFFLOADS_MIDDLE else None,
        sends_again=phase == "backward" and strategy in {"S2", "S4"},
        copies_overlap=mode == "pinned",
        sorts_rows=costs.sorts_rows,
    )


def reuse_tasks(*, chunk: ReusedChunk, phase: Phase, degree: int) -> list[Task]:
    """Return the tasks of a phase, two dispatches ahead of the experts (MPipeMoE Fig. 7).

    The link runs D₁ D₂ C₁ D₃ C₂ … backward, as the paper has it, each D twice where T_DI is sent
    again. Forward it runs D₁ D₂ D₃ C₁ D₄ C₂ …, D₃ once the first chunk's experts have left its
    buffer: the experts wait for D₃ and not for C₁, which saves up to 12 % where t_d < t_e < 2·t_d.
    Backward that would take a fourth buffer of gradients, up to 3 % over the bound of Eq. 6.
    """
    is_forward, chunks = phase == "forward", range(degree)
    ahead, dispatch = (_AHEAD, _dispatch) if is_forward else (1, _dispatch_backward)
    link = [task for i in chunks[:ahead] for task in dispatch(chunk, i)]
    for i in chunks:
        link += dispatch(chunk, i + ahead) if i + ahead < degree else ()
        link.append(Task(f"combine {i}", "comm", LINK, chunk.transfer.seconds, (f"after {i}",)))
    experts = [] if is_forward else [*_first_loads(chunk, degree)]
    compute = _forward if is_forward else _backward
    return [*link, *experts, *(task for i in chunks for task in compute(chunk, i, degree))]


def _dispatch(chunk: ReusedChunk, i: int) -> Iterator[Task]:
    """Yield a dispatch, which waits until its buffer of received rows is free."""
    before, saves = i - _AHEAD, chunk.copy_input is not None and not chunk.sorts_rows
    after = (f"after {before}", f"save input {before}")[: 1 + saves] if before >= 0 else ()
    yield Task(f"dispatch {i}", "comm", LINK, chunk.transfer.seconds, after)


def _dispatch_backward(chunk: ReusedChunk, i: int) -> Iterator[Task]:
    if chunk.sends_again:
        yield Task(f"dispatch again {i}", "comm", LINK, chunk.transfer.seconds)
    yield Task(f"dispatch {i}", "comm", LINK, chunk.transfer.seconds)


def _forward(chunk: ReusedChunk, i: int, degree: int) -> Iterator[Task]:
    arrived = (f"dispatch {i}",)
    before = list(arrived)
    after = [f"combine {i - _AHEAD}"] if i >= _AHEAD else []  # T_DO has two buffers, too
    if chunk.copy_input is not None:
        idle = (f"after {i - 1}",) if i else ()
        yield _copying(chunk, f"save input {i}", chunk.copy_input, (*arrived, *idle))
        after += [f"save input {i}"] if chunk.sorts_rows else []
    if chunk.copy_middle is not None and i:
        before.append(f"save middle {i - 1}")
    if chunk.copy_input is not None and not chunk.sorts_rows and 0 < i < degree - 1:
        before.append(f"save input {i - 1}")  # which the next dispatch, ahead of C, waits for
    yield Task(f"before {i}", "comp", COMPUTE, chunk.before.seconds, tuple(before))
    if chunk.copy_middle is not None:
        yield _copying(chunk, f"save middle {i}", chunk.copy_middle, (f"before {i}",))
    yield Task(f"after {i}", "comp", COMPUTE, chunk.after.seconds, tuple(after))


def _first_loads(chunk: ReusedChunk, degree: int) -> Iterator[Task]:
    if chunk.copy_input is not None:
        yield _copying(chunk, "load input 0", chunk.copy_input)
    if chunk.copy_middle is not None:
        yield _copying(chunk, "load middle 0", chunk.copy_middle)
    if chunk.copy_input is not None and degree > 1:
        yield _copying(chunk, "load input 1", chunk.copy_input)


def _backward(chunk: ReusedChunk, i: int, degree: int) -> Iterator[Task]:
    """Yield a chunk's experts and the loads of the chunks behind it, as buffers become free."""
    needed = [f"dispatch {i}"]
    needed += [f"load input {i}"] if chunk.copy_input is not None else []
    needed += [f"load middle {i}"] if chunk.copy_middle is not None else []
    yield Task(f"before {i}", "comp", COMPUTE, chunk.before.seconds, tuple(needed))
    if chunk.copy_middle is not None and i + 1 < degree:
        yield _copying(chunk, f"load middle {i + 1}", chunk.copy_middle, (f"before {i}",))
    yield Task(f"after {i}", "comp", COMPUTE, chunk.after.seconds)
    if chunk.copy_input is not None and i + _AHEAD < degree:
        yield _copying(chunk, f"load input {i + _AHEAD}", chunk.copy_input, (f"after {i}",))


def _copying(chunk: ReusedChunk, name: str, copy: Estimate, after: Sequence[str] = ()) -> Task:
    stream = COPIES if chunk.copies_overlap else COMPUTE
    return Task(name, "mem", stream, copy.seconds, tuple(after))


def reused_seconds(
    *, chunk: ReusedChunk, phase: Phase, degrees: Ints, interference: Interference
) -> Floats:
    """Return the makespans of `reuse_tasks` in n numbers of chunks.

    Once the streams stand to each other as they did one chunk before, every further chunk takes as
    long as that one did: the first `FEW` chunks tell the time of any number of them.

    Args:
        chunk: seconds of its operations are numbers, or arrays of shape (n,).
        degrees: chunks, shape (n,).
        interference: its speeds are numbers, or arrays of shape (n,).

    Raises:
        ArithmeticError: a duration is negative or not finite.
    """
    durations = as_rows(chunk.durations, len(degrees))
    if not (np.isfinite(durations).all() and (durations >= 0).all()):
        raise ArithmeticError("the times of a chunk are negative, or no finite numbers")
    speeds, seconds = speeds_of(interference, len(degrees)), np.full(len(degrees), np.nan)
    for most in (FEW, _MORE, int(degrees.max())):
        left = np.flatnonzero(np.isnan(seconds))
        if len(left):
            simulated = np.minimum(degrees[left], most)
            numbers, numbers_of = np.unique(simulated, return_inverse=True)
            chunks = _chunks(chunk.pattern, phase, tuple(numbers.tolist()))
            makespans, settled = _run(chunks, numbers_of, durations[:, left], speeds[..., left])
            more = degrees[left] - simulated
            seconds[left] = makespans + np.where(more > 0, more * settled, 0.0)
    return seconds


class _Chunks(NamedTuple):
    """The program of a phase in some numbers of chunks.

    Args:
        ends_chunk: whether a task is the experts' last one of a chunk between the edges.
        step: tasks of a chunk in each stream, shape (streams,).
    """

    program: Program
    ends_chunk: NDArray[np.bool_]
    step: Ints


@lru_cache(maxsize=1024)
def _chunks(pattern: ReusedChunk, phase: Phase, numbers: tuple[int, ...]) -> _Chunks:
    """Return the program of `reuse_tasks` in so many chunks, by the pattern of each."""
    phases = [reuse_tasks(chunk=pattern, phase=phase, degree=number) for number in numbers]
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
    """Run phases in numbers of chunks, of which each has one.

    Returns:
        When the last task of each phase ends, and the seconds of a chunk once its streams have
        settled, NaN where they have not; both of shape (n,).
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
