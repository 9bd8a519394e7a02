"""Times of phases that reuse memory, for many numbers of tokens and of chunks.

All chunks are predicted at once. Those phases are simulated, all of them at once, that lower
bounds do not exclude.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from moetune.domain.arrays import Floats, array_of, as_rows
from moetune.domain.constraints import Strategy
from moetune.domain.layer import PHASES, Phase
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.least_seconds import least_seconds
from moetune.solve.layer.many_phases import reused_seconds_of_many, seconds_where_settled
from moetune.solve.layer.phase_arrays import (
    COMM_BESIDE_COMP,
    COMP_BESIDE_COMM,
    Bools,
    Ints,
    ManyPhases,
    joined,
    speeds_of,
)
from moetune.solve.layer.reuse import chunk_of
from moetune.solve.layer.sized import sized

_FEWEST = 3
"""Cases of each number of tokens, in the fewest chunks, that are simulated first."""
_SURELY = 1 - 1e-9
"""Of a limit: what is below it is so whatever the rounding of bounds."""


class Cases(NamedTuple):
    """Numbers of tokens and of chunks for some phases.

    Args:
        phases: one, or both in as many chunks.
        tokens, degrees: of each case, ascending, shape (cases,).
    """

    phases: Sequence[Phase]
    tokens: Ints
    degrees: Ints


class NearBest:
    """Which of some cases take hardly longer than the best one of the same phases and tokens.

    Simulated are those that lower bounds do not exclude: at first the most promising one of each
    number of tokens and those in the fewest chunks, the others where these do not tell.

    Args:
        asked: each with as many phases.
        tolerance: by how large a share of the best time a near one is longer at most.

    Raises:
        ArithmeticError: the costs are absurd, and no time is a number.
    """

    def __init__(
        self, asked: Sequence[Cases], *, costs: LayerCosts, strategy: Strategy, tolerance: float
    ) -> None:
        parts = [_chunks_of(costs, one.phases, strategy, one.tokens, one.degrees) for one in asked]
        self._chunks = [joined(each) for each in zip(*parts, strict=True)]
        with np.errstate(over="ignore", invalid="ignore"):
            self._least = np.sum([least_seconds(each) for each in self._chunks], axis=0)
        _check_finite(self._least)
        sizes = np.concatenate([one.tokens for one in asked])
        ends = np.cumsum([len(one.tokens) for one in asked])
        is_first = np.diff(sizes, prepend=0) != 0
        is_first[ends[:-1]] = True
        self._firsts, self._of_size = np.flatnonzero(is_first), np.cumsum(is_first) - 1
        self._longer = 1 + tolerance
        self._seconds = np.full(len(sizes), np.inf)
        self._surely: list[bool] = []
        self._may_be: list[bool] = []
        self._simulate(self._first())

    def is_near(self, case: int) -> bool:
        """Return whether the case at an index is near the best one."""
        if self._may_be[case] and not self._surely[case]:
            self._simulate(self._may_be_near(self._best) & np.isinf(self._seconds))
            near = self._seconds <= (self._best * self._longer)[self._of_size]
            self._surely = self._may_be = near.tolist()
        return self._surely[case]

    def _first(self) -> Bools:
        """Return the cases to simulate first."""
        best = np.lexsort((self._least, self._of_size))[self._firsts]
        may_be_near = self._may_be_near(self._least_of_size)
        before: Ints = np.cumsum(may_be_near) - may_be_near
        wanted: Bools = may_be_near & (before - before[self._firsts][self._of_size] < _FEWEST)
        wanted[best] = True
        return wanted

    @property
    def _least_of_size(self) -> Floats:
        found: Floats = np.minimum.reduceat(self._least, self._firsts)
        return found

    def _may_be_near(self, best: Floats) -> Bools:
        """Return the cases that bounds do not exclude.

        Args:
            best: seconds for each number of tokens.
        """
        found: Bools = self._least <= (best * self._longer)[self._of_size]
        return found

    def _simulate(self, cases: Bools) -> None:
        """Simulate some cases, and note of all of them what that tells."""
        self._seconds[cases] = _simulated([each.only(cases) for each in self._chunks]).sum(axis=0)
        self._best = np.minimum.reduceat(self._seconds, self._firsts)
        surely = self._seconds <= (self._least_of_size * self._longer * _SURELY)[self._of_size]
        at_least = np.where(np.isinf(self._seconds), self._least, self._seconds)
        may_be = at_least <= (self._best * self._longer)[self._of_size]
        self._surely, self._may_be = surely.tolist(), may_be.tolist()


def exact_seconds(
    *, costs: LayerCosts, strategy: Strategy, tokens: Ints, degrees: Ints
) -> list[list[float]]:
    """Return the time of each phase of some cases: `times.phase_time`, to the last bit.

    Args:
        tokens: of each case, shape (cases,), at most `arrays.FEW`.
        degrees: of each phase, shape (phases, cases).
    """
    parts = [
        _chunks_of(costs, [phase], strategy, tokens, each)[0]
        for phase, each in zip(PHASES, degrees, strict=True)
    ]
    phases = joined(parts)
    seconds = seconds_where_settled(phases)
    left = np.flatnonzero(np.isnan(seconds))
    if len(left):
        phases = phases.only(left)
        seconds[left] = seconds_where_settled(phases, int(phases.degree.max()))
    _check_finite(seconds)
    found: list[list[float]] = seconds.reshape(len(parts), -1).tolist()
    return found


class Simulations:
    """Both phases with one strategy, in many numbers of chunks.

    Phases whose streams settle late are simulated when they are asked for.

    Attributes:
        is_known: which are simulated, shape (phases, degrees).
        seconds: of these; lower bounds of the others.
    """

    def __init__(self, parts: Sequence[ManyPhases], seconds: Floats) -> None:
        self._parts = parts
        self.is_known = ~np.isnan(seconds)
        self.seconds = seconds.copy()
        if not self.is_known.all():
            with np.errstate(over="ignore", invalid="ignore"):
                self.seconds[~self.is_known] = least_seconds(self._left())
        _check_finite(self.seconds)

    def finish(self) -> None:
        """Simulate what is not known."""
        if not self.is_known.all():
            phases = self._left()
            self.seconds[~self.is_known] = seconds_where_settled(phases, int(phases.degree.max()))
            self.is_known[:] = True

    def _left(self) -> ManyPhases:
        return joined(self._parts).only(~self.is_known.ravel())


def simulations(
    *, costs: LayerCosts, strategies: Sequence[Strategy], tokens: int, degrees: Sequence[int]
) -> dict[Strategy, Simulations]:
    """Return both phases with each of the strategies in so many chunks.

    Raises:
        ArithmeticError: the costs are absurd, and no time is a number.
    """
    sizes = np.full(len(degrees), tokens)
    parts = [_chunks_of(costs, PHASES, one, sizes, np.array(degrees)) for one in strategies]
    seconds = seconds_where_settled(joined([each for both in parts for each in both]))
    rows = seconds.reshape(len(strategies), len(PHASES), len(degrees))
    return {
        one: Simulations(both, row) for one, both, row in zip(strategies, parts, rows, strict=True)
    }


def _chunks_of(
    costs: LayerCosts, phases: Sequence[Phase], strategy: Strategy, tokens: Ints, degrees: Ints
) -> list[ManyPhases]:
    layer = sized(costs)
    rows = layer.rows(array_of(tokens), degree=cast("int", degrees))
    with np.errstate(over="ignore", invalid="ignore"):
        found = [_chunks(layer, phase, strategy, rows, degrees) for phase in phases]
    for each in found:
        _check_finite(each.durations)
    return found


def _check_finite(seconds: Floats) -> None:
    """Raise ArithmeticError where a time is no finite number: it has no place in an order."""
    if not np.isfinite(seconds).all():
        raise ArithmeticError("the times of a phase are no finite numbers")


def _simulated(parts: Sequence[ManyPhases]) -> Floats:
    """Return the times of the same number of phases in each part, shape (parts, phases)."""
    seconds = reused_seconds_of_many(joined(parts))
    _check_finite(seconds)
    return seconds.reshape(len(parts), -1)


def _chunks(
    layer: LayerCosts, phase: Phase, strategy: Strategy, rows: float, degrees: Ints
) -> ManyPhases:
    """Return the phase in chunks of so many rows."""
    degree = cast("int", degrees)
    chunk = chunk_of(costs=layer, phase=phase, strategy=strategy, rows=rows, degree=degree)
    transfer_seconds = layer.transfer(rows=rows, degree=degree).seconds
    speeds = as_rows(speeds_of(layer.costs.interference), len(degrees))
    overlapped = layer.speeds(rows=rows, transfer_seconds=transfer_seconds)
    speeds[COMP_BESIDE_COMM], speeds[COMM_BESIDE_COMP] = overlapped.comp, overlapped.comm
    return ManyPhases(
        kinds=(chunk.kind(phase),),
        kind=np.zeros(len(degrees), np.int64),
        degree=degrees,
        durations=as_rows(chunk.durations, len(degrees)),
        speeds=speeds,
    )
