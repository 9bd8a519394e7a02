"""Times of phases that reuse memory, for many numbers of tokens and of chunks."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from moetune.domain.arrays import Floats, array_of, as_rows
from moetune.domain.constraints import Strategy
from moetune.domain.layer import PHASES, Phase
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.many_phases import reused_seconds
from moetune.solve.layer.phase_arrays import (
    COMM_BESIDE_COMP,
    COMP_BESIDE_COMM,
    Ints,
    ManyPhases,
    joined,
    speeds_of,
)
from moetune.solve.layer.reuse import chunk_of


class Cases(NamedTuple):
    """Numbers of tokens and of chunks for some phases.

    Args:
        phases: one, or both in as many chunks.
        tokens, degrees: of each case, ascending, shape (cases,).
    """

    phases: Sequence[Phase]
    tokens: Ints
    degrees: Ints


def near_best_of(
    asked: Sequence[Cases], *, costs: LayerCosts, strategy: Strategy, tolerance: float
) -> list[bool]:
    """Return which cases take hardly longer than the best one of the same phases and tokens.

    Args:
        asked: each with as many phases.
        tolerance: by how large a share of the best time a near one is longer at most.

    Raises:
        ArithmeticError: the costs are absurd, and no time is a number.
    """
    parts = [_chunks_of(costs, one.phases, strategy, one.tokens, one.degrees) for one in asked]
    seconds = np.concatenate([_seconds(each).sum(axis=0) for each in parts])
    sizes = np.concatenate([one.tokens for one in asked])
    is_first = np.diff(sizes, prepend=0) != 0
    is_first[np.cumsum([len(one.tokens) for one in asked])[:-1]] = True
    best = np.minimum.reduceat(seconds, np.flatnonzero(is_first))
    near: list[bool] = (seconds <= (best * (1 + tolerance))[np.cumsum(is_first) - 1]).tolist()
    return near


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
    found: list[list[float]] = _seconds(parts).tolist()
    return found


def simulations(
    *, costs: LayerCosts, strategies: Sequence[Strategy], tokens: int, degrees: Sequence[int]
) -> dict[Strategy, Floats]:
    """Return the seconds of both phases with each strategy, each of shape (phases, degrees).

    Raises:
        ArithmeticError: the costs are absurd, and no time is a number.
    """
    sizes = np.full(len(degrees), tokens)
    parts = [_chunks_of(costs, PHASES, one, sizes, np.array(degrees)) for one in strategies]
    seconds = _seconds([each for both in parts for each in both])
    rows = seconds.reshape(len(strategies), len(PHASES), len(degrees))
    return dict(zip(strategies, rows, strict=True))


def _seconds(parts: Sequence[ManyPhases]) -> Floats:
    """Return the times of the same number of phases in each part, shape (parts, phases)."""
    seconds = reused_seconds(joined(parts))
    _check_finite(seconds)
    return seconds.reshape(len(parts), -1)


def _chunks_of(
    costs: LayerCosts, phases: Sequence[Phase], strategy: Strategy, tokens: Ints, degrees: Ints
) -> list[ManyPhases]:
    rows = costs.rows(array_of(tokens), degree=cast("int", degrees))
    with np.errstate(over="ignore", invalid="ignore"):
        found = [_chunks(costs, phase, strategy, rows, degrees) for phase in phases]
    for each in found:
        _check_finite(each.durations)
    return found


def _check_finite(seconds: Floats) -> None:
    """Raise ArithmeticError where a time is no finite number: it has no place in an order."""
    if not np.isfinite(seconds).all():
        raise ArithmeticError("the times of a phase are no finite numbers")


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
