"""A layer's costs under refits of the measurements, all at once: measured steps hold there, too.

Every time is an array, with one entry for each refit. Sums and products of times hold for arrays as
they hold for numbers, so that `LayerCosts` and the closed forms work out a layer once.

An operation that a refit makes slower makes the sum of a step's operations longer; the step itself
was measured, so that the difference between both is smaller there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from moetune.domain.costs import Costs, costs_of_all
from moetune.domain.samples import StepRecord
from moetune.domain.step_errors import NO_STEP_ERRORS
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.times import step_time

IMPLAUSIBLE = 0.2
"""A residual that no refit may have: three standard deviations of those in the network lab's
record (`fit.step_errors.RECORDED_SPREAD`)."""
LEAST_SHARE = 0.5
"""Of the refits that are kept, whatever their residuals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refits:
    """A layer's costs under `num` refits, all of them at once."""

    num: int
    stack: LayerCosts


def of_each(seconds: float, num: int) -> list[float]:
    """Return the seconds under each of so many refits, of stacked costs or the same for all."""
    return cast("list[float]", np.broadcast_to(seconds, num).tolist())


def refits_of(nominal: LayerCosts, resamples: Sequence[Costs], *, tokens: int) -> Refits:
    """Return the layer's costs under the refits that the measured steps do not contradict.

    Without any refit they are the nominal costs.

    Beyond its measured sizes an operation is drawn from a wide range, and most of that cannot be
    where steps that consist of it were measured.

    The nominal costs keep those that were asked of them first: a plan asks for them twice.

    Args:
        tokens: of a step on one rank.
    """

    def made() -> tuple[Sequence[Costs], Refits]:
        return resamples, _refits(nominal, resamples, tokens)

    of, refits = nominal.kept(("refits", tokens), made)
    return refits if of is resamples else made()[1]


def _refits(nominal: LayerCosts, resamples: Sequence[Costs], tokens: int) -> Refits:
    errors = nominal.step_errors(tokens=tokens)
    if not errors.records or not resamples:
        costs = costs_of_all(resamples) if resamples else nominal.costs
        return Refits(num=len(resamples) or 1, stack=replace(nominal, costs=costs))
    drawn = np.array([_residuals(record, resamples) for record in errors.records]).T
    largest = np.abs(drawn).max(axis=1)
    limit = max(IMPLAUSIBLE, np.sort(largest)[math.ceil(LEAST_SHARE * len(largest)) - 1])
    kept = np.flatnonzero(largest <= limit)
    costs = costs_of_all([resamples[at] for at in kept.tolist()])
    stack = replace(nominal, costs=costs, errors=errors.given(drawn[kept]))
    return Refits(num=len(kept), stack=stack)


def _residuals(record: StepRecord, resamples: Sequence[Costs]) -> list[float]:
    """Return the record's residual under each refit."""
    load, num = record.workload, len(resamples)
    layer = layer_costs(workload=load, costs=costs_of_all(resamples))
    step = step_time(
        costs=replace(layer, errors=NO_STEP_ERRORS),
        tokens=load.tokens_per_rank,
        forward_degree=record.degree,
        backward_degree=record.degree,
    )
    chunks = of_each(step.forward.seconds + step.backward.seconds, num)
    return [
        replace(record, chunks_seconds=chunks_seconds, overhead_seconds=overhead_seconds).residual
        for chunks_seconds, overhead_seconds in zip(
            chunks, of_each(step.overhead.seconds, num), strict=True
        )
    ]
