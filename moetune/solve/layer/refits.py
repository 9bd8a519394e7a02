"""A layer's costs under a refit of the measurements: the measured steps hold there, too.

An operation that a refit makes slower makes the sum of a step's operations longer; the step itself
was measured, so that the difference between both is smaller there.
"""

from dataclasses import replace

from moetune.domain.costs import Costs
from moetune.domain.step_errors import NO_STEP_ERRORS, StepRecord
from moetune.solve.layer.costs import LayerCosts
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.times import step_time


def refitted(nominal: LayerCosts, refit: Costs, *, tokens: int) -> LayerCosts:
    """Return the layer's costs under a refit, for steps with so many tokens on each rank."""
    errors = nominal.step_errors(tokens=tokens)
    if errors.records:
        errors = errors.given([_residual(one, refit) for one in errors.records])
    return replace(nominal, costs=refit, errors=errors)


def _residual(record: StepRecord, costs: Costs) -> float:
    load = record.workload
    summed = replace(layer_costs(workload=load, costs=costs), errors=NO_STEP_ERRORS)
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
