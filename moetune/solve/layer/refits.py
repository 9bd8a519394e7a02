"""A layer's costs under a refit of the measurements: the measured steps hold there, too.

An operation that a refit makes slower makes the sum of a step's operations longer; the step itself
was measured, so that the difference between both is smaller there.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from moetune.domain.costs import Costs
from moetune.domain.step_errors import NO_STEP_ERRORS, StepRecord
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.times import step_time

IMPLAUSIBLE = 0.2
"""A residual that no refit may have: three standard deviations of those in the network lab's
record (`fit.model_error.OF_LAYERS`)."""
LEAST_SHARE = 0.5
"""Of the refits that are kept, whatever their residuals."""


def refits_of(
    nominal: LayerCosts, resamples: Sequence[Costs], *, tokens: int
) -> tuple[LayerCosts, ...]:
    """Return the layer's costs under each refit that the measured steps do not contradict.

    Beyond its measured sizes an operation is drawn from a wide range, and most of that cannot be
    where steps that consist of it were measured.

    Args:
        tokens: of a step on one rank.
    """
    errors = nominal.step_errors(tokens=tokens)
    if not errors.records:
        return tuple(replace(nominal, costs=one) for one in resamples)
    drawn = [(one, [_residual(record, one) for record in errors.records]) for one in resamples]
    largest = [max(map(abs, residuals)) for _, residuals in drawn]
    limit = max(IMPLAUSIBLE, sorted(largest)[math.ceil(LEAST_SHARE * len(largest)) - 1])
    return tuple(
        replace(nominal, costs=one, errors=errors.given(residuals))
        for (one, residuals), size in zip(drawn, largest, strict=True)
        if size <= limit
    )


def _residual(record: StepRecord, costs: Costs) -> float:
    load = record.workload
    # Corrections are of a later time than the measured step.
    measured = layer_costs(workload=load, costs=costs.as_measured)
    summed = replace(measured, errors=NO_STEP_ERRORS)
    step = step_time(
        costs=summed,
        tokens=load.tokens_per_rank,
        forward_degree=record.degree,
        backward_degree=record.degree,
    )
    return replace(
        record,
        chunks_seconds=step.forward.seconds + step.backward.seconds,
        overhead_seconds=step.overhead.seconds,
    ).residual
