"""Confidence in a layout, against plans made anew with every decision pinned."""

from dataclasses import replace

import pytest

from moetune.domain.constraints import Bounds, LayoutPins
from moetune.domain.costs import Costs
from moetune.domain.model_plan import Confidence
from moetune.domain.plan import Plan
from moetune.fit.costs import costs_of
from moetune.solve.layout.candidates import Candidate
from moetune.solve.layout.choose import LayoutProblem, search_layouts
from moetune.solve.layout.plan import solve_layout
from moetune.solve.layout.uncertainty import NUM_CONTENDERS
from tests.solve.clusters import GB, cluster_profile
from tests.solve.costs_by_hand import as_refits
from tests.solve.test_chunk_plans import profile_of
from tests.solve.test_chunk_plans import question as chunk_question
from tests.solve.test_layout_plan import question

pytestmark = pytest.mark.unmeasured

WIRES = (60.0, 130.0, 300.0)


def under(*inside: float) -> tuple[Costs, ...]:
    """Costs of the cluster with other wires inside its nodes, in GB a second."""
    return as_refits(*(costs_of(cluster_profile(inside=one * GB)) for one in inside))


def confidence_of(plan: Plan) -> Confidence:
    assert plan.transformer is not None
    assert plan.transformer.confidence is not None
    return plan.transformer.confidence


def pinned_seconds(problem: LayoutProblem, one: Candidate, costs: Costs) -> float:
    """The step of a plan that is made anew with every decision of the candidate pinned."""
    layout, setting, degrees = one.layout, one.setting, one.priced.moe.step.degrees
    pins = LayoutPins(
        expert_parallel=layout.expert_parallel, dp=layout.dp, ep=layout.ep, tp=layout.tp,
        pp=layout.pp, micro_batch=setting.sequences, zero=setting.zero, offload=setting.offload,
    )  # fmt: skip
    bounds = Bounds(forward_degree=degrees[0], backward_degree=degrees[1])
    again = replace(problem, pins=pins, bounds=bounds, costs=costs, resamples=())
    plan = solve_layout(again).plan
    assert plan.transformer is not None
    return plan.transformer.step_seconds


def test_a_layout_is_compared_with_the_best_others_under_each_refit() -> None:
    problem = replace(question(), resamples=under(*WIRES))
    _, found = search_layouts(problem)
    near = [one for one in found.best if one.seconds <= 1.2 * found.best[0].seconds]
    near = near[: NUM_CONTENDERS + 1]
    assert len(near) > 1
    times = [[pinned_seconds(problem, one, costs) for one in near] for costs in under(*WIRES)]
    confidence = confidence_of(solve_layout(problem).plan)
    best = [row[0] <= min(row) * (1 + 1e-12) for row in times]
    assert set(best) == {True, False}
    assert confidence.probability_best == sum(best) / 3
    assert confidence.expected_regret == pytest.approx(
        sum(row[0] / min(row) - 1 for row in times) / 3
    )
    low, middle, high = sorted(row[0] for row in times)
    assert confidence.p05_step_seconds == pytest.approx(low + 0.1 * (middle - low))
    assert confidence.p95_step_seconds == pytest.approx(high - 0.1 * (high - middle))


def test_without_refits_a_layout_is_certain() -> None:
    plan = solve_layout(question()).plan
    assert plan.transformer is not None
    step = plan.transformer.step_seconds
    assert confidence_of(plan) == Confidence(
        probability_best=1.0, expected_regret=0.0, p05_step_seconds=step, p95_step_seconds=step
    )


@pytest.mark.parametrize(("name", "num_ranks"), [("gpt-2.7b", 1), ("gpt-20b", 8)])
def test_chunks_take_as_long_as_planned_where_a_refit_says_the_same(
    name: str, num_ranks: int
) -> None:
    problem = chunk_question(name, world_size=num_ranks)
    plan = solve_layout(replace(problem, resamples=as_refits(problem.costs))).plan
    assert plan.transformer is not None
    assert plan.chunks is not None
    step = plan.transformer.step_seconds
    assert confidence_of(plan).p05_step_seconds == pytest.approx(step, rel=1e-12)


def test_chunks_and_their_cache_stay_as_they_are_under_a_refit() -> None:
    """Slower copies take longer in the chosen cache than in the one that is chosen for them."""
    problem, slower = chunk_question(), costs_of(profile_of(copied=12 * GB))
    _, found = search_layouts(problem)
    assert found.best[0].setting.offload
    other = confidence_of(solve_layout(replace(problem, resamples=as_refits(slower))).plan)
    assert other.p05_step_seconds > 1.05 * found.best[0].seconds
    anew = pinned_seconds(problem, found.best[0], slower)
    assert other.p05_step_seconds >= anew * (1 - 1e-12)
