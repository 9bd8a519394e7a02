"""The degree of a tensor-parallel layer against simulations and brute force."""

import math
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moetune.domain.any_plan import plan_from_json
from moetune.domain.constraints import Bounds
from moetune.domain.costs import Costs, LinearCost
from moetune.domain.document import canonical_json
from moetune.domain.errors import InfeasiblePlanError, ProfileError
from moetune.domain.interference import CommSpeed, CompSpeed, Interference
from moetune.domain.layer import PHASES, LayerShape, Workload
from moetune.domain.layout import Layout
from moetune.domain.plan import Plan
from moetune.domain.units import format_bytes, format_seconds
from moetune.solve.layer.degree import tensor_parallel_makespan
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.plan import LayerProblem, SolvedPlan
from moetune.solve.layer.timeline import simulate, tensor_parallel_tasks
from moetune.solve.predict import plan_timelines
from tests.solve.costs_by_hand import LinearCosts, best_moe_step, event_by_event, plan_inputs

seconds = st.floats(min_value=1e-3, max_value=10.0)
speeds = st.floats(min_value=0.05, max_value=1.0)
alphas = st.one_of(st.just(0.0), st.floats(min_value=1e-9, max_value=10.0))
betas = st.one_of(st.just(0.0), st.floats(min_value=1e-18, max_value=1e-3))
sizes = st.floats(min_value=1.0, max_value=1e16)

LAYER = LayerShape(d_model=1024, d_hidden=4096, num_experts=16, top_k=2)
WORKLOAD = Workload(
    layer=LAYER, world_size=4, tokens_per_rank=4096, dtype="bfloat16", expert_parallel="tensor"
)
DISTURBED = Interference(comm=CommSpeed(comp=0.8), comp=CompSpeed(comm=0.7))
MEASURED = LinearCosts(
    has_points=True, power=0.97, interference=DISTURBED,
    rows_seconds={"gelu": 1e-11, "gelu_backward": 2e-11, "gather": 1e-11, "scatter_add": 3e-11},
)  # fmt: skip
GATED = replace(MEASURED, rows_seconds={**MEASURED.rows_seconds, "gate": 1e-9})


@settings(deadline=None)
@given(st.integers(1, 24), seconds, seconds, speeds, speeds)
@example(7, 1.0, 3.0, 1.0, 1.0)
@example(7, 3.0, 1.0, 1.0, 1.0)
def test_tensor_parallel_makespan_equals_both_simulations(
    degree: int, t_s: float, t_e: float, comm_speed: float, comp_speed: float
) -> None:
    found = tensor_parallel_makespan(
        degree=degree, transfer_seconds=t_s, compute_seconds=t_e, comm_speed=comm_speed,
        comp_speed=comp_speed,
    )  # fmt: skip
    beside = Interference(comm=CommSpeed(comp=comm_speed), comp=CompSpeed(comm=comp_speed))
    tasks = tensor_parallel_tasks(compute_seconds=[t_e] * degree, reduce_seconds=[t_s] * degree)
    fluid = simulate(tasks, interference=beside).makespan_seconds
    assert math.isclose(found, fluid, rel_tol=1e-9)
    # Nothing is dispatched: all rows are there at once.
    order = [(step, chunk) for step in "DC" for chunk in range(degree)]
    events = event_by_event(
        dispatch=[0.0] * degree, compute=[t_e] * degree, combine=[t_s] * degree,
        link_order=order, comm_speed=comm_speed, comp_speed=comp_speed,
    )  # fmt: skip
    assert math.isclose(found, events, rel_tol=1e-9)


@pytest.mark.parametrize(
    ("t_e", "t_s", "expected"), [(5.0, 3.0, 5 + 3 + 2 * 5), (3.0, 5.0, 3 + 5 + 2 * 5)]
)
def test_undisturbed_the_slower_of_both_repeats(t_e: float, t_s: float, expected: float) -> None:
    assert tensor_parallel_makespan(degree=3, transfer_seconds=t_s, compute_seconds=t_e) == expected


def _by_hand(costs: LinearCosts, phase: str, degree: int) -> float:
    """Return the phase of `WORKLOAD` from the formulas: T/r·M·s bytes, T·k/(r·P) rows."""
    tokens, pairs = 4096 / degree, 4096 * 2 / 4 / degree
    t_s = 1e-4 + 5e-10 * (tokens * 1024 * 2) ** costs.power
    num_gemms = 2 if phase == "forward" else 4
    t_e = num_gemms * (5e-5 + 4e-14 * pairs * 1024 * 4096)
    seconds = costs.rows_seconds
    if seconds:
        t_e += seconds["gelu"] * pairs * 4096
        t_e += (seconds["gather"] + seconds["scatter_add"]) * pairs * 1024
        if phase == "backward":
            t_e += seconds["gelu_backward"] * pairs * 4096 + seconds["gather"] * pairs * 1024
    tasks = tensor_parallel_tasks(compute_seconds=[t_e] * degree, reduce_seconds=[t_s] * degree)
    return simulate(tasks, interference=costs.interference).makespan_seconds


def test_best_step_of_lines_is_the_minimum_over_all_degrees() -> None:
    costs = LinearCosts()
    step = best_moe_step(workload=WORKLOAD, costs=costs, bounds=Bounds())
    for phase in PHASES:
        times = [_by_hand(costs, phase, degree) for degree in range(1, 65)]
        found = step.forward if phase == "forward" else step.backward
        assert found.seconds == pytest.approx(min(times))
        assert found.degree == times.index(min(times)) + 1 > 1
    assert step.overhead.seconds == 0.0
    assert step.seconds == step.forward.seconds + step.backward.seconds


def test_best_step_of_measured_costs_is_within_noise_of_the_best() -> None:
    step = best_moe_step(workload=WORKLOAD, costs=MEASURED, bounds=Bounds())
    for phase in PHASES:
        times = [_by_hand(MEASURED, phase, degree) for degree in range(1, 65)]
        found = step.forward if phase == "forward" else step.backward
        assert found.seconds == pytest.approx(times[found.degree - 1])
        assert found.seconds <= 1.01 * min(times)


def test_overhead_is_gate_agreement_and_the_sum_of_the_weights_gradients() -> None:
    free = LinearCost(alpha_seconds=0.0, beta_seconds=0.0)
    costs = replace(GATED, gemm_cost=free, power=1.0)
    step = best_moe_step(workload=WORKLOAD, costs=costs, bounds=Bounds())
    sums = (1e-4 + 5e-10 * 8) + (1e-4 + 5e-10 * 4096 * 2 * 4)
    assert step.overhead.seconds == pytest.approx(1e-9 * 4096 * 16 + sums)


def test_one_rank_sums_nothing_and_many_need_a_measured_all_reduce() -> None:
    costs = LinearCosts(group_size=99, has_points=True)
    alone = best_moe_step(workload=replace(WORKLOAD, world_size=1), costs=costs, bounds=Bounds())
    assert alone.degrees == (1, 1)
    assert alone.forward.transfer.seconds == 0.0
    with pytest.raises(ProfileError, match="all_reduce"):
        best_moe_step(workload=WORKLOAD, costs=costs, bounds=Bounds())


def _solved(
    costs: Costs, *, gib: float = 80, bounds: Bounds | None = None, dtype: str = "bfloat16"
) -> SolvedPlan:
    inputs = plan_inputs(
        layer=LAYER, world_size=4, dtype=dtype, constraints={"expert-parallel": "tensor"}
    )
    return LayerProblem(
        inputs=inputs, costs=costs, resamples=(), bounds=bounds or Bounds(),
        device_memory_bytes=round(gib * 2**30), provenance="measured",
    ).solve()  # fmt: skip


def _solve(costs: Costs, *, gib: float = 80, bounds: Bounds | None = None) -> Plan:
    return _solved(costs, gib=gib, bounds=bounds).plan


@pytest.mark.parametrize("costs", [LinearCosts(), MEASURED, GATED])
def test_a_plan_is_the_best_step_and_its_timeline_takes_as_long(costs: LinearCosts) -> None:
    plan = _solve(costs)
    assert plan.layout == Layout(expert_parallel="tensor", dp=1, ep=1, tp=4, pp=1)
    assert plan_from_json(canonical_json(plan), "plan.json") == plan
    step = best_moe_step(workload=WORKLOAD, costs=costs, bounds=Bounds())
    assert (plan.pipeline.forward_degree, plan.pipeline.backward_degree) == step.degrees
    assert plan.predicted.step_seconds == pytest.approx(step.seconds)
    forward, backward = plan_timelines(plan=plan, costs=costs)
    assert forward.makespan_seconds == pytest.approx(plan.predicted.forward_seconds)
    assert backward.makespan_seconds == pytest.approx(plan.predicted.backward_seconds)
    assert {span.name.split()[0] for span in forward.spans} == {"experts", "sum"}


def test_ranges_of_lines_hold_the_best_degrees_of_other_sizes() -> None:
    plan = _solve(LinearCosts())
    for tokens in (1, 16, 700, 4095, 9000, 2**19):
        workload = replace(WORKLOAD, tokens_per_rank=tokens)
        best = best_moe_step(workload=workload, costs=LinearCosts(), bounds=Bounds())
        decision = plan.decide(tokens)
        pinned = Bounds(
            forward_degree=decision.forward_degree, backward_degree=decision.backward_degree
        )
        held = best_moe_step(workload=workload, costs=LinearCosts(), bounds=pinned)
        assert held.seconds <= best.seconds * (1 + 1e-3)


def test_more_chunks_than_are_best_are_taken_where_memory_binds_and_it_says_so() -> None:
    """In float32: narrower gradients are summed in float32 where there are several chunks."""
    slow_gemms = LinearCosts(gemm_cost=LinearCost(alpha_seconds=1.0, beta_seconds=1e-15))
    roomy = _solved(slow_gemms, dtype="float32").plan
    needed = roomy.memory.peak_bytes
    assert needed is not None
    assert roomy.pipeline.backward_degree == 1
    assert format_seconds(roomy.predicted.step_seconds) in roomy.decision.why
    tight = _solved(slow_gemms, gib=0.97 * needed / 2**30, dtype="float32").plan
    assert tight.pipeline.backward_degree > 1
    assert tight.decision.binding == "memory"
    assert format_bytes(needed) in tight.decision.why
    assert tight.memory.peak_bytes is not None
    assert tight.memory.peak_bytes <= 0.97 * needed
    with pytest.raises(InfeasiblePlanError, match="strategy none"):
        _solve(slow_gemms, gib=0.1)


def test_a_pinned_degree_is_kept_and_its_price_told() -> None:
    plan = _solve(LinearCosts(), bounds=Bounds(forward_degree=1))
    assert plan.pipeline.forward_degree == 1
    assert any("pinned forward degree 1" in warning for warning in plan.warnings)


def test_no_memory_is_reused_so_no_strategy_has_terms() -> None:
    solved = _solved(LinearCosts())
    assert solved.terms.strategies == ()
    assert solved.terms.forward.seconds == solved.plan.predicted.forward_seconds


def test_no_row_is_sorted_by_its_sender_where_every_rank_has_all_rows() -> None:
    rows = 1000.0
    exchanged = layer_costs(workload=replace(WORKLOAD, expert_parallel="all_to_all"), costs=GATED)
    assert exchanged.sorting(rows).seconds == pytest.approx(1e-11 * rows * LAYER.d_model)
    assert layer_costs(workload=WORKLOAD, costs=GATED).sorting(rows).seconds == 0
