"""Refits of a layer's costs: what was measured as a whole holds under each of them."""

import numpy as np
import pytest

from moetune.domain.costs import LinearCost
from moetune.domain.samples import StepRecord
from moetune.fit.step_errors import MachineErrors
from moetune.solve.layer.costs import layer_costs
from moetune.solve.layer.times import step_seconds, step_time
from moetune.solve.layer.uncertainty import Refits, refits_of
from tests.solve.costs_by_hand import GEMM, LinearCosts
from tests.solve.test_uncertainty import WORKLOAD

TOKENS = WORKLOAD.tokens_per_rank


def seconds(costs: LinearCosts, degree: int = 16) -> float:
    layer = layer_costs(workload=WORKLOAD, costs=costs)
    return step_time(costs=layer, tokens=TOKENS, degree=degree).seconds


def measured(factor: float) -> LinearCosts:
    """Return costs beside a step in 16 chunks that took `factor` times the sum of them."""
    record = StepRecord(
        workload=WORKLOAD, degree=16, chunks_seconds=seconds(LinearCosts()), overhead_seconds=0.0,
        measured_seconds=factor * seconds(LinearCosts()),
    )  # fmt: skip
    errors = MachineErrors(records=[record], spread=0.1).of(WORKLOAD.key, TOKENS)
    return LinearCosts(errors=errors)


def test_a_predicted_step_is_the_measured_step() -> None:
    assert seconds(measured(1.1)) == pytest.approx(1.1 * seconds(LinearCosts()), rel=0.01)
    assert seconds(measured(1.1), degree=1) == pytest.approx(seconds(LinearCosts(), 1), rel=1e-3)


def taken(refits: Refits, degree: int = 16) -> list[float]:
    phases, overhead = step_seconds(costs=refits.stack, tokens=TOKENS, degree=degree)
    seconds: list[float] = np.broadcast_to(phases + overhead, refits.num).tolist()
    return seconds


def refits(factor: float, *gemms: LinearCost) -> Refits:
    nominal = layer_costs(workload=WORKLOAD, costs=measured(factor))
    return refits_of(nominal, [LinearCosts(gemm_cost=gemm) for gemm in gemms], tokens=TOKENS)


def slower(factor: float) -> LinearCost:
    return LinearCost(
        alpha_seconds=factor * GEMM.alpha_seconds, beta_seconds=factor * GEMM.beta_seconds
    )


def test_a_measured_step_takes_as_long_under_slower_operations() -> None:
    made = refits(1.1, slower(1.2))
    assert taken(made) == pytest.approx([seconds(measured(1.1))], rel=0.01)
    (in_one_chunk,) = taken(made, 1)
    assert in_one_chunk > 1.05 * seconds(measured(1.1), degree=1)


def test_refits_that_a_measured_step_contradicts_are_left_out() -> None:
    near, far = slower(1.02), slower(20.0)
    assert refits(1.0, near, near, far).num == 2
    assert refits(1.0, far, far, near).num == 3
