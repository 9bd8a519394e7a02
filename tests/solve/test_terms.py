"""The terms behind a plan come from the candidates that were ranked for it."""

from dataclasses import replace

import pytest

from moetune.domain.constraints import STRATEGIES, Bounds, Strategy
from moetune.domain.costs import Costs, LinearCost
from moetune.domain.interference import CommSpeed, CompSpeed, Interference
from moetune.domain.plan import Alternative
from moetune.solve.layer.memory import layer_memory, total_bytes
from moetune.solve.layer.plan import LayerProblem, SolvedPlan
from moetune.solve.layer.strategies import phase_terms
from moetune.solve.predict import plan_step
from tests.solve.costs_by_hand import LinearCosts, plan_inputs

COSTS = LinearCosts(
    interference=Interference(comm=CommSpeed(comp=0.8), comp=CompSpeed(comm=0.9)),
    copy_mode="pinned",
    copy_cost=LinearCost(alpha_seconds=1e-5, beta_seconds=1e-10),
)
SMALL = Bounds(max_degree=8)


def _solve(
    bounds: Bounds | None = None, *, costs: Costs = COSTS, memory_bytes: int = 2**40
) -> SolvedPlan:
    return LayerProblem(
        inputs=plan_inputs(),
        costs=costs,
        resamples=(),
        bounds=bounds or SMALL,
        device_memory_bytes=memory_bytes,
        provenance="measured",
    ).solve()


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
    solved = _solve(bounds)
    plan, (row,) = solved.plan, [one for one in solved.terms.strategies if one.is_chosen]
    assert row.strategy == plan.memory.strategy
    assert (row.forward_degree, row.backward_degree) == solved.ranked.step.degrees
    assert row.step_seconds == plan.predicted.step_seconds == solved.ranked.step.seconds
    assert row.needed_bytes == total_bytes(plan.memory)
    assert (row.fits, row.lost_because) == (True, "")


def test_the_rows_of_losers_are_the_alternatives_of_the_plan() -> None:
    solved = _solve()
    lost: dict[Strategy, Alternative] = {
        one.strategy: one for one in solved.plan.alternatives if one.strategy != "none"
    }
    rows = [one for one in solved.terms.strategies if not one.is_chosen]
    assert [one.strategy for one in rows] == ["S1", "S2", "S3", "S4"]
    for row in rows:
        other = lost[row.strategy]
        assert (row.step_seconds, row.lost_because) == (other.step_seconds, other.lost_because)
    assert sum(one.is_paper_choice for one in solved.terms.strategies) == 1


@pytest.mark.parametrize("strategy", ["none", "S1", "S4"])
def test_a_pinned_strategy_stands_beside_the_same_others_as_a_free_one(strategy: Strategy) -> None:
    free = {one.strategy: one for one in _solve().terms.strategies}
    pinned = {
        one.strategy: one for one in _solve(replace(SMALL, strategy=strategy)).terms.strategies
    }
    assert tuple(pinned) == STRATEGIES
    for name, row in pinned.items():
        mine = replace(row, is_chosen=False, lost_because="")
        assert mine == replace(free[name], is_chosen=False, lost_because="")


def test_rows_know_the_order_that_was_pinned() -> None:
    undisturbed = replace(COSTS, interference=Interference())
    three = Bounds(forward_degree=3, backward_degree=3)
    free, pinned = (
        _solve(bounds, costs=undisturbed) for bounds in (three, replace(three, order="interleaved"))
    )
    assert pinned.terms.strategies[0].step_seconds > free.terms.strategies[0].step_seconds
    assert [one.strategy for one in _solve(Bounds(order="dispatch_first")).terms.strategies] == [
        "none"
    ]


def test_what_does_not_fit_has_a_row_at_its_fastest() -> None:
    free = _solve()
    in_one = layer_memory(workload=free.plan.workload, forward_degree=1, backward_degree=1)
    tight = _solve(memory_bytes=total_bytes(in_one) - 1)
    row = tight.terms.strategies[0]
    assert (row.strategy, row.fits, row.is_chosen) == ("none", False, False)
    assert row.step_seconds == free.ranked.step.seconds
    assert "does not fit" in row.lost_because


def test_phase_terms_add_up() -> None:
    solved = _solve()
    for phase, seconds in (
        (solved.ranked.step.forward, solved.plan.predicted.forward_seconds),
        (solved.ranked.step.backward, solved.plan.predicted.backward_seconds),
    ):
        terms = phase_terms(phase)
        assert terms.seconds == seconds
        assert terms.total_transfer_seconds == 2 * terms.degree * terms.transfer_seconds
        assert terms.total_compute_seconds == terms.degree * terms.compute_seconds
        work = terms.total_transfer_seconds + terms.total_compute_seconds
        assert terms.hidden_seconds == pytest.approx(work - terms.seconds)


def test_a_finished_plan_has_the_step_that_was_chosen() -> None:
    for bounds in (SMALL, replace(SMALL, order="interleaved"), replace(SMALL, strategy="S1")):
        solved = _solve(bounds)
        assert plan_step(plan=solved.plan, costs=COSTS) == solved.ranked.step
