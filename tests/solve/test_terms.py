"""The terms behind a plan come from the candidates that were ranked for it."""

from dataclasses import replace

import pytest

from moetune.domain.constraints import Bounds
from moetune.domain.costs import LinearCost
from moetune.domain.interference import CommSpeed, CompSpeed, Interference
from tests.solve.costs_by_hand import LinearCosts, solution

COSTS = LinearCosts(
    interference=Interference(comm=CommSpeed(comp=0.8), comp=CompSpeed(comm=0.9)),
    copy_mode="pinned",
    copy_cost=LinearCost(alpha_seconds=1e-5, beta_seconds=1e-10),
)
SMALL = Bounds(max_degree=8)


@pytest.mark.parametrize(
    "bounds",
    [
        SMALL,
        replace(SMALL, order="interleaved"),
        replace(SMALL, forward_degree=3, order="interleaved"),
        replace(SMALL, strategy="S2"),
        replace(SMALL, strategy="S4", backward_degree=5),
        Bounds(strategy="none", max_degree=1),
    ],
)
def test_the_chosen_row_is_the_plan_itself(bounds: Bounds) -> None:
    plan = solution(bounds=bounds, costs=COSTS)
    assert plan.terms is not None
    (row,) = (one for one in plan.terms.strategies if one.is_chosen)
    assert row.strategy == plan.memory.strategy
    degrees = plan.pipeline.forward_degree, plan.pipeline.backward_degree
    assert (row.forward_degree, row.backward_degree) == degrees
    assert row.step_seconds == plan.predicted.step_seconds
    assert row.needed_bytes == plan.memory.formula_bytes
    assert (row.fits, row.lost_because) == (True, "")


def test_phase_terms_add_up() -> None:
    plan = solution(bounds=SMALL, costs=COSTS)
    assert plan.terms is not None
    for terms, seconds in (
        (plan.terms.forward, plan.predicted.forward_seconds),
        (plan.terms.backward, plan.predicted.backward_seconds),
    ):
        assert terms.seconds == seconds
        assert terms.total_transfer_seconds == 2 * terms.degree * terms.transfer_seconds
        assert terms.total_compute_seconds == terms.degree * terms.compute_seconds
        work = terms.total_transfer_seconds + terms.total_compute_seconds
        assert terms.hidden_seconds == pytest.approx(work - terms.seconds)
