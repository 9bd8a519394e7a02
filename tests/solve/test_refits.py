"""Refits of a layer's costs: what was measured as a whole holds under each of them."""

from dataclasses import replace

import pytest

from moetune.domain.costs import LinearCost
from moetune.domain.step_errors import StepRecord
from moetune.fit.step_errors import MachineErrors
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.refits import refitted
from moetune.solve.layer.times import step_time
from tests.solve.costs_by_hand import GEMM, LinearCosts
from tests.solve.test_uncertainty import WORKLOAD

TOKENS = WORKLOAD.tokens_per_rank
SLOWER = LinearCost(alpha_seconds=1.2 * GEMM.alpha_seconds, beta_seconds=1.2 * GEMM.beta_seconds)


def seconds(costs: LinearCosts, degree: int = 16) -> float:
    layer = layer_costs(workload=WORKLOAD, costs=costs)
    return step_time(
        costs=layer, tokens=TOKENS, forward_degree=degree, backward_degree=degree
    ).seconds


def measured(factor: float) -> LinearCosts:
    """Return costs beside a step in 16 chunks that took `factor` times the sum of them."""
    record = StepRecord(
        workload=WORKLOAD, degree=16, chunks_seconds=seconds(LinearCosts()), overhead_seconds=0.0,
        measured_seconds=factor * seconds(LinearCosts()),
    )  # fmt: skip
    errors = MachineErrors([record], own=0.1).of(WORKLOAD.key, TOKENS)
    return LinearCosts(errors=errors)


def test_a_predicted_step_is_the_measured_one() -> None:
    assert seconds(measured(1.1)) == pytest.approx(1.1 * seconds(LinearCosts()), rel=0.01)
    assert seconds(measured(1.1), degree=1) == pytest.approx(seconds(LinearCosts(), 1), rel=1e-3)


def test_a_measured_step_takes_as_long_under_slower_operations() -> None:
    nominal = layer_costs(workload=WORKLOAD, costs=measured(1.1))
    slower = refitted(nominal, replace(LinearCosts(), gemm_cost=SLOWER), tokens=TOKENS)
    found, far = (
        step_time(costs=slower, tokens=TOKENS, forward_degree=d, backward_degree=d).seconds
        for d in (16, 1)
    )
    assert found == pytest.approx(seconds(measured(1.1)), rel=0.02)
    assert far > 1.05 * seconds(measured(1.1), degree=1)


def test_without_measured_steps_a_refit_is_only_other_costs() -> None:
    nominal = layer_costs(workload=WORKLOAD, costs=LinearCosts())
    other = replace(LinearCosts(), gemm_cost=SLOWER)
    found = refitted(nominal, other, tokens=TOKENS)
    assert step_time(
        costs=found, tokens=TOKENS, forward_degree=16, backward_degree=16
    ).seconds == seconds(other)
