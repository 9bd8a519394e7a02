"""Times of phases that reuse memory, all of them simulated at once.

Each array operation moves every phase to its own next event.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import product

import numpy as np

from moetune.domain.arrays import Floats
from moetune.solve.layer.phase_arrays import PLACES, Bools, Ints, ManyPhases
from moetune.solve.layer.reuse import ChunkKind
from moetune.solve.layer.steady import (
    CODES,
    COUNT_BITS,
    FEW,
    GUARD,
    STREAMS,
    WEIGHTS,
    program,
)
from moetune.solve.layer.timeline import COMPUTE

_MORE = 24
"""Chunks that are simulated where the streams have not settled after `FEW`."""
_NUM_STREAMS = len(STREAMS)
_COMPUTE = STREAMS.index(COMPUTE)
_NUM_SETS = 12
"""Sets of classes that may run at once, as `steady.WEIGHTS` number them."""
_ONE_ENDED = np.array([1 << COUNT_BITS * stream for stream in range(_NUM_STREAMS)])
SAME = 1e-13
"""Share of a chunk's time by which the streams may differ and still stand as one chunk before."""
_OVER_SHARE = 0.3
"""Of phases that are over, above which they are left out."""


def reused_seconds(phases: ManyPhases) -> Floats:
    """Return the makespans of the phases' `reuse.reuse_tasks`, shape (n,).

    Raises:
        ValueError: a duration is negative or not finite.
    """
    durations = phases.durations
    if not (np.isfinite(durations).all() and (durations >= 0).all()):
        raise ValueError("a task must take 0 or more seconds")
    seconds = np.full(len(phases.degree), np.nan)
    for most in (FEW, _MORE, int(phases.degree.max(initial=0))):
        left = np.flatnonzero(np.isnan(seconds))
        if len(left):
            seconds[left] = _where_settled(phases.only(left), most)
    return seconds


@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def _where_settled(phases: ManyPhases, most: int) -> Floats:
    """Return the makespans, NaN where streams have not settled after so many chunks."""
    chunks = np.minimum(phases.degree, most)
    found, settled = _Runs(phases, chunks).finish()
    more = phases.degree - chunks
    seconds: Floats = found + np.where(more > 0, more * settled, 0.0)
    return seconds


def _speed_places() -> Ints:
    """Return where the speed of each stream is in each set of classes that run at once.

    Returns:
        Its place among `speeds_of`; the first behind them where a stream is alone, and the second
        where it is idle; shape (streams, sets).
    """
    alone, idle = len(PLACES), len(PLACES) + 1
    found = np.full((_NUM_STREAMS, _NUM_SETS), idle)
    for codes in product(*(range(len(names) + 1) for names in CODES)):
        number = sum(map(operator.mul, WEIGHTS, codes))
        running = [
            names[code - 1] if code else None for names, code in zip(CODES, codes, strict=True)
        ]
        for stream, victim in enumerate(running):
            others = {*running} - {victim, None}
            if victim is not None:
                beside = "all" if len(others) > 1 else next(iter(others), None)
                found[stream, number] = PLACES[victim, beside] if beside else alone
    return found


_SPEED_PLACES = _speed_places()


def _joined_programs(wanted: Iterable[tuple[ChunkKind, int]]) -> tuple[Ints, Ints, Ints]:
    """Return the first tasks, the steps and the tasks of a chunk of phases in so many chunks.

    Returns:
        As `Program` has them, shapes (wanted, streams), (4, tasks) and (wanted, streams).
    """
    every = [program(kind, num) for kind, num in wanted]
    lengths = np.array([one.steps.shape[1] for one in every])
    starts = np.cumsum(lengths) - lengths
    first = np.array([one.first for one in every]) + starts[:, None]
    return first, np.hstack([one.steps for one in every]), np.array([one.each for one in every])


class _Runs:
    """Simulations of the first chunks of phases, all at once; those that are over are left out.

    Args:
        num_chunks: of each phase, shape (n,).
    """

    def __init__(self, phases: ManyPhases, num_chunks: Ints) -> None:
        num, most = len(num_chunks), int(num_chunks.max()) + 1
        programs, of_phase = np.unique(phases.kind * most + num_chunks, return_inverse=True)
        first, steps, each = _joined_programs(
            [(phases.kinds[one // most], one % most) for one in programs.tolist()]
        )
        steps[:2] *= num  # they are rows of arrays with a column for each phase
        self._duration, self._code, self._needs, compares = steps
        self._compares = compares.astype(bool)
        self._durations = np.ascontiguousarray(phases.durations)
        of_places = np.vstack([phases.speeds, np.ones(num), np.zeros(num)])
        self._speeds = of_places[_SPEED_PLACES]
        head = first.T[:, of_phase]
        self._state = _State(
            phase=np.arange(num),
            speeds=np.arange(_NUM_STREAMS)[:, None] * _NUM_SETS * num + np.arange(num),
            each=each.T[:, of_phase],
            head=head,
            first=GUARD - _ONE_ENDED @ head,
            left=np.empty(head.shape),
            now=np.zeros(num),
            before=np.full(num, np.nan),
            had=np.zeros(head.shape),
            then=np.zeros_like(head),
        )
        self._state.left = self._whole()
        self._settled = np.full(num, np.nan)

    def finish(self) -> tuple[Floats, Floats]:
        """Run all tasks.

        Returns:
            When the last task of each phase ends, and the seconds of a chunk once its streams have
            settled, NaN where they have not; both of shape (n,).
        """
        ends = np.zeros(len(self._settled))
        while True:
            state = self._state
            num_ended = _ONE_ENDED @ state.head + state.first
            running = (num_ended - self._needs.take(state.head)) & GUARD == GUARD
            sets = np.add.reduce(self._code.take(state.head) * running, axis=0)
            is_over = sets == 0
            if np.count_nonzero(is_over) > _OVER_SHARE * len(sets):
                ends[state.phase[is_over]] = state.now[is_over]
                if is_over.all():
                    return ends, self._settled
                going = ~is_over
                state = self._state = state.only(going)
                sets, is_over = sets[going], is_over[going]
            self._advance(sets, is_over)

    def _advance(self, sets: Ints, is_over: Bools) -> None:
        """Move each phase to the next end of a task."""
        state = self._state
        speeds = self._speeds.take(sets + state.speeds)
        times = state.left / speeds  # of an idle stream infinite; where nothing is left either, NaN
        step = np.fmin.reduce(times, axis=0)
        step[is_over] = 0.0
        state.now += step
        is_ended = times <= step
        state.head += is_ended
        left = state.left - step * speeds
        state.left = np.where(is_ended, self._whole(), left)
        compared = self._compares.take(state.head[_COMPUTE]) & is_ended[_COMPUTE]
        if np.count_nonzero(compared):
            self._compare(np.flatnonzero(compared & np.isnan(self._settled[state.phase])))

    def _compare(self, at: Ints) -> None:
        """Compare the streams, as the experts are through with a chunk, with a chunk before."""
        state = self._state
        seconds = state.now[at] - state.before[at]
        moved = state.head[:, at] - state.then[:, at] == state.each[:, at]
        apart = np.abs(state.left[:, at] - state.had[:, at]).max(axis=0)
        is_settled = moved.all(axis=0) & (apart <= SAME * seconds)
        self._settled[state.phase[at[is_settled]]] = seconds[is_settled]
        state.before[at], state.then[:, at] = state.now[at], state.head[:, at]
        state.had[:, at] = state.left[:, at]

    def _whole(self) -> Floats:
        """Return the seconds of the tasks at the heads of the streams."""
        state = self._state
        found: Floats = self._durations.take(self._duration.take(state.head) + state.phase)
        return found


@dataclass(slots=True, kw_only=True)
class _State:
    """Phases under way; the last axis is theirs.

    Args:
        phase: their indices.
        speeds: where those of each stream begin among all, shape (streams, n).
        each: tasks of a chunk.
        head, left: each stream's next task, and its seconds that are left.
        first: what the numbers of ended tasks are, as one, beyond those of the heads.
        before, then, had: `now`, `head` and `left` a chunk before; NaN without one.
    """

    phase: Ints
    speeds: Ints
    each: Ints
    head: Ints
    left: Floats
    first: Ints
    now: Floats
    before: Floats
    had: Floats
    then: Ints

    def only(self, chosen: Bools) -> "_State":
        """Return some of the phases."""
        return _State(**{one.name: getattr(self, one.name)[..., chosen] for one in fields(self)})
