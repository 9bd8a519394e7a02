"""Plans that rest on times that nobody measured."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from moetune.domain.constraints import Bounds
from moetune.domain.costs import Costs, Doubt, Refit
from moetune.domain.interference import CommSpeed, CompSpeed, Interference
from moetune.domain.plan import Plan
from moetune.report.doubts import doubt_warnings
from moetune.solve.layer.costs import layer_costs
from moetune.solve.layer.times import step_time
from tests.solve.costs_by_hand import ALL_TO_ALL, LinearCosts, plan_inputs, solution

FAR = Doubt(operation="all_to_all of 8 ranks", size=2.0**20, unit="bytes", low=2.0**8, high=2.0**12)
LOSING = (1.0, 30.0, 60.0)
DOUBTED = LinearCosts(has_points=True, trust="extrapolated", doubts=(FAR,))


def with_start_up(*factors: float) -> tuple[Refit, ...]:
    """Refits in which an exchange starts so much slower: more chunks lose."""
    return tuple(
        replace(
            DOUBTED,
            transfer_cost=replace(ALL_TO_ALL, alpha_seconds=factor * ALL_TO_ALL.alpha_seconds),
        )
        for factor in factors
    )


def solve(costs: Costs, resamples: Sequence[Refit], bounds: Bounds | None = None) -> Plan:
    return solution(costs=costs, resamples=resamples, bounds=bounds)


def degree_of(plan: Plan) -> int:
    return plan.decide(plan.tokens_per_rank).degree


def expected_losses(resamples: Sequence[Refit], degree: int) -> tuple[float, float]:
    """Expected relative loss of several chunks against one, and of one against several."""
    workload = plan_inputs().workload(solve(DOUBTED, ()).layout)

    def seconds(costs: Costs, chunks: int) -> float:
        layer = layer_costs(workload=workload, costs=costs)
        return step_time(costs=layer, tokens=4096, degree=chunks).seconds

    pairs = [(seconds(refit, degree), seconds(refit, 1)) for refit in resamples]
    return (
        sum(max(several / single - 1, 0) for several, single in pairs) / len(pairs),
        sum(max(single / several - 1, 0) for several, single in pairs) / len(pairs),
    )


@pytest.mark.parametrize(
    "factors", [(0.5, 1.0, 2.0), (1.0, 10.0, 30.0), (1.0, 30.0, 60.0), (0.1, 0.5, 80.0)]
)
def test_doubtful_chunks_are_taken_only_where_they_are_expected_to_gain(
    factors: tuple[float, ...],
) -> None:
    several = degree_of(solve(DOUBTED, ()))
    assert several > 1
    resamples = with_start_up(*factors)
    loss, loss_of_one = expected_losses(resamples, several)
    plan = solve(DOUBTED, resamples)
    assert ("One chunk is the safe answer" in plan.decision.why) == (loss >= loss_of_one)
    assert degree_of(plan) == (1 if loss >= loss_of_one else several)


def test_one_chunk_as_the_safe_answer_holds_everywhere_in_the_plan() -> None:
    several = solve(DOUBTED, ())
    plan = solve(DOUBTED, with_start_up(*LOSING))
    assert {(forward, backward) for _, _, forward, backward in plan.pipeline.ranges} == {(1, 1)}
    assert plan.predicted.step_seconds == plan.predicted.sequential_step_seconds
    assert plan.terms is not None
    chosen = next(row for row in plan.terms.strategies if row.is_chosen)
    assert (chosen.forward_degree, chosen.backward_degree) == (1, 1)
    assert chosen.step_seconds == plan.predicted.step_seconds
    promised = [row for row in plan.alternatives if row.step_seconds < plan.predicted.step_seconds]
    assert degree_of(several) in {row.forward_degree for row in promised}
    assert plan.decision.why != several.decision.why


@pytest.mark.parametrize("speed", [0.5, 0.55])
@pytest.mark.parametrize(("spread", "is_luck"), [(0.01, False), (0.5, True)])
def test_chunks_that_hide_little_gain_more_than_the_error_or_are_not_taken(
    spread: float, speed: float, *, is_luck: bool
) -> None:
    shared = Interference(comp=CompSpeed(comm=speed), comm=CommSpeed(comp=speed))
    costs = LinearCosts(has_points=True, power=1.15, interference=shared)  # small ones are quicker
    beta = costs.transfer_cost.beta_seconds
    resamples = [
        replace(costs, transfer_cost=replace(costs.transfer_cost, beta_seconds=factor * beta))
        for factor in (1 - spread, 1.0, 1 + spread)
    ]
    assert degree_of(solve(costs, ())) > 1
    plan = solve(costs, resamples)
    assert (degree_of(plan) == 1) == is_luck
    assert ("within the profile's error" in plan.decision.why) == is_luck


def test_warnings_name_each_operation_with_all_its_sizes_and_what_measures_them() -> None:
    doubts = [
        FAR,
        FAR._replace(size=2.0**24),
        Doubt(operation="send of 2 ranks", size=1.0, unit="bytes", stand_in="send of 4 ranks"),
        Doubt(operation="gelu in float32", size=7.0, unit="elements", low=8.0, high=9.0),
    ]
    exchange, send, gelu, command = doubt_warnings(doubts, command="measure this")
    for part in ("all_to_all of 8 ranks", "1.00 MiB", "16.0 MiB", "256 B", "4.00 KiB"):
        assert part in exchange
    assert "send of 2 ranks" in send
    assert "send of 4 ranks" in send
    assert "7 elements" in gelu
    assert command.endswith("measure this")
    assert list(doubt_warnings((), command="measure this")) == []


def test_a_plan_names_what_its_times_and_those_of_one_chunk_rest_on() -> None:
    plan = solve(DOUBTED, ())
    assert sum(FAR.operation in warning for warning in plan.warnings) == 1
    assert any("--d-model 1024 --d-hidden 4096" in warning for warning in plan.warnings)
    assert solve(replace(DOUBTED, doubts=(), trust="measured"), ()).warnings == ()
