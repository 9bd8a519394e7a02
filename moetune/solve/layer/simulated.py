"""Times of phases that reuse memory, for many numbers of tokens and of chunks.

All chunks are predicted at once. Those phases are simulated, all of them at once, that lower
bounds do not exclude.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np

from moetune.domain.arrays import Floats, array_of
from moetune.domain.constraints import Strategy
from moetune.domain.layer import PHASES, Phase
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.many_phases import (
    COMM_BESIDE_COMP,
    COMP_BESIDE_COMM,
    Ints,
    ManyPhases,
    reused_seconds_of_many,
    seconds_where_settled,
    speeds_of,
)
from moetune.solve.layer.reuse import chunk_of, num_transfers
from moetune.solve.layer.sized import sized


def near_best_seconds(
    *,
    costs: LayerCosts,
    phases: Sequence[Phase],
    strategy: Strategy,
    tokens: Ints,
    degrees: Ints,
    tolerance: float,
) -> Floats:
    """Return the time of all phases together, of cases with so many tokens in so many chunks.

    Args:
        phases: one, or both in as many chunks.
        tokens, degrees: of each case, shape (cases,).
        tolerance: cases that take longer than the best one with as many tokens, by more than this
            share of it, need no time.

    Returns:
        Shape (cases,); infinity where it is not needed.

    Raises:
        ArithmeticError: the costs are absurd, and no time is a number.
    """
    chunks = _chunks_of(costs, phases, strategy, tokens, degrees)
    with np.errstate(over="ignore", invalid="ignore"):
        least = np.sum([_least_seconds(each) for each in chunks], axis=0)
    _check_finite(least)
    seconds = np.full(len(tokens), np.inf)
    sizes, of_size = np.unique(tokens, return_inverse=True)

    def simulate(cases: Ints) -> None:
        seconds[cases] = _simulated([each.only(cases) for each in chunks]).sum(axis=0)

    ordered = np.lexsort((least, of_size))
    simulate(ordered[np.unique(of_size[ordered], return_index=True)[1]])
    best = np.full(len(sizes), np.inf)
    np.minimum.at(best, of_size, seconds)
    may_be_near = (least <= best[of_size] * (1 + tolerance)) & np.isinf(seconds)
    simulate(np.flatnonzero(may_be_near))
    return seconds


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
        with np.errstate(over="ignore", invalid="ignore"):
            least = [_least_seconds(each) for each in parts]
        self.seconds = np.where(self.is_known, seconds, least)
        _check_finite(self.seconds)

    def finish(self) -> None:
        """Simulate what is not known."""
        if not self.is_known.all():
            left = ~self.is_known.ravel()
            phases = _joined(self._parts).only(left)
            self.seconds[~self.is_known] = seconds_where_settled(phases, int(phases.degree.max()))
            self.is_known[:] = True


def simulations(
    *, costs: LayerCosts, strategies: Sequence[Strategy], tokens: int, degrees: Sequence[int]
) -> dict[Strategy, Simulations]:
    """Return both phases with each of the strategies in so many chunks.

    Raises:
        ArithmeticError: the costs are absurd, and no time is a number.
    """
    sizes = np.full(len(degrees), tokens)
    parts = [_chunks_of(costs, PHASES, one, sizes, np.array(degrees)) for one in strategies]
    seconds = seconds_where_settled(_joined([each for both in parts for each in both]))
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
    seconds = reused_seconds_of_many(_joined(parts))
    _check_finite(seconds)
    return seconds.reshape(len(parts), -1)


def _chunks(
    layer: LayerCosts, phase: Phase, strategy: Strategy, rows: float, degrees: Ints
) -> ManyPhases:
    """Return the phase in chunks of so many rows."""
    degree = cast("int", degrees)
    chunk = chunk_of(costs=layer, phase=phase, strategy=strategy, rows=rows, degree=degree)
    transfer_seconds = layer.transfer(rows=rows, degree=degree).seconds
    speeds = np.empty((len(speeds_of(layer.costs.interference)), len(degrees)))
    speeds[:] = np.array(speeds_of(layer.costs.interference))[:, None]
    overlapped = layer.speeds(rows=rows, transfer_seconds=transfer_seconds)
    speeds[COMP_BESIDE_COMM], speeds[COMM_BESIDE_COMP] = overlapped.comp, overlapped.comm
    return ManyPhases(
        kinds=(chunk.kind(phase),),
        kind=np.zeros(len(degrees), np.int64),
        degree=degrees,
        durations=np.stack([np.broadcast_to(one, len(degrees)) for one in chunk.durations]),
        speeds=speeds,
    )


def _joined(parts: Sequence[ManyPhases]) -> ManyPhases:
    """Return the phases of all parts, each part of one kind."""
    return ManyPhases(
        kinds=[kind for one in parts for kind in one.kinds],
        kind=np.concatenate([one.kind + at for at, one in enumerate(parts)]),
        degree=np.concatenate([one.degree for one in parts]),
        durations=np.hstack([one.durations for one in parts]),
        speeds=np.hstack([one.speeds for one in parts]),
    )


def _least_seconds(phases: ManyPhases) -> Floats:
    """Return lower bounds of the phases' times: the work of each stream, without interference."""
    (kind,) = phases.kinds
    transfer, before, after, copy_input, copy_middle = phases.durations
    ends = num_transfers(is_sent_again=kind.sends_again) * transfer
    device, copies = phases.degree * (before + after), phases.degree * (copy_input + copy_middle)
    if not kind.copies_overlap:
        device = device + copies
    bounds: Floats = np.maximum.reduce([phases.degree * ends, ends + device, copies])
    return bounds
