"""A layer inside a tensor-parallel group, against events and brute force."""

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moetune.domain.any_plan import plan_from_json
from moetune.domain.constraints import Bounds
from moetune.domain.costs import LinearCost
from moetune.domain.document import canonical_json
from moetune.domain.errors import InfeasiblePlanError, ProfileError
from moetune.domain.interference import CommSpeed, CompSpeed, Interference
from moetune.domain.layer import PHASES, LayerShape, Workload
from moetune.domain.layout import Layout
from moetune.domain.plan import Plan
from moetune.domain.samples import CollectiveOp
from moetune.domain.units import format_bytes, format_seconds
from moetune.fit.interference import speeds_of
from moetune.solve.layer.costs import layer_costs
from moetune.solve.layer.degree import tensor_parallel_makespan
from moetune.solve.layer.memory import layer_memory
from moetune.solve.layer.timeline import simulate, tensor_parallel_tasks
from moetune.solve.trace import plan_timelines
from tests.solve.costs_by_hand import (
    GEMM,
    LinearCosts,
    best_moe_step,
    event_by_event,
    plan_inputs,
    solution,
)

SUM = LinearCost(alpha_seconds=3e-5, beta_seconds=7e-10)
FREE = LinearCost(alpha_seconds=0.0, beta_seconds=0.0)
LAYER = LayerShape(d_model=1024, d_hidden=4096, num_experts=16, top_k=2)
TOKENS, RANKS = 4096, 4
SUMMED = Workload(
    layer=LAYER, world_size=RANKS, tokens_per_rank=TOKENS, dtype="bfloat16",
    expert_parallel="tensor",
)  # fmt: skip
TENSOR_PLAN_ID = "9996a18e18b93cad292dd24106d0a325c43dade3d5411a03e3d6e9cc6114375b"

seconds = st.floats(min_value=1e-3, max_value=10.0)
speeds = st.floats(min_value=0.05, max_value=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLines(LinearCosts):
    """A line for all-reduces, and for no other collective."""

    sum_cost: LinearCost = SUM

    def _line(self, op: CollectiveOp) -> LinearCost:
        return {"all_reduce": self.sum_cost}[op]


MEASURED = TensorLines(
    has_points=True, power=0.99,
    interference=Interference(comm=CommSpeed(comp=0.95), comp=CompSpeed(comm=0.9)),
    rows_seconds={
        "gelu": 1e-11, "gelu_backward": 2e-11, "gather": 1e-11, "scatter_add": 3e-11, "gate": 1e-9
    },
)  # fmt: skip


def by_hand(costs: TensorLines, phase: str, degree: int) -> float:
    """Simulate a phase: T/r·M·s bytes summed for a chunk."""
    pairs = TOKENS * 2 / RANKS / degree
    t_s = costs.sum_cost.seconds((TOKENS / degree * 1024 * 2) ** costs.power)
    num_gemms = 2 if phase == "forward" else 4
    t_e = num_gemms * costs.gemm_cost.seconds(pairs * 1024 * 4096)
    rows = costs.rows_seconds
    if rows:
        t_e += rows["gelu"] * pairs * 4096
        t_e += (rows["gather"] + rows["scatter_add"]) * pairs * 1024
        if phase == "backward":
            t_e += rows["gelu_backward"] * pairs * 4096 + rows["gather"] * pairs * 1024
    return event_by_event(
        dispatch=[0.0] * degree, compute=[t_e] * degree, combine=[t_s] * degree,
        link_order=[(step, chunk) for step in "DC" for chunk in range(degree)],
        comm_speed=costs.interference.comm.comp, comp_speed=costs.interference.comp.comm,
    )  # fmt: skip


def times_by_hand(costs: TensorLines) -> dict[int, tuple[float, float]]:
    """Return the seconds of both phases by their number of chunks."""
    return {
        degree: (by_hand(costs, "forward", degree), by_hand(costs, "backward", degree))
        for degree in range(1, 65)
    }


@settings(deadline=None)
@given(st.integers(1, 24), seconds, seconds, speeds, speeds)
@example(7, 1.0, 3.0, 1.0, 1.0)
@example(7, 3.0, 1.0, 1.0, 1.0)
def test_tensor_parallel_makespan_equals_both_simulations(
    degree: int, t_s: float, t_e: float, comm_speed: float, comp_speed: float
) -> None:
    makespan = tensor_parallel_makespan(
        degree=degree, transfer_seconds=t_s, compute_seconds=t_e, comm_speed=comm_speed,
        comp_speed=comp_speed,
    )  # fmt: skip
    table = Interference(comm=CommSpeed(comp=comm_speed), comp=CompSpeed(comm=comp_speed))
    tasks = tensor_parallel_tasks(compute_seconds=[t_e] * degree, reduce_seconds=[t_s] * degree)
    simulated = simulate(tasks, speeds=speeds_of(table)).makespan_seconds
    assert math.isclose(makespan, simulated, rel_tol=1e-9)
    events = event_by_event(  # nothing is dispatched: all rows are there at once
        dispatch=[0.0] * degree, compute=[t_e] * degree, combine=[t_s] * degree,
        link_order=[(step, chunk) for step in "DC" for chunk in range(degree)],
        comm_speed=comm_speed, comp_speed=comp_speed,
    )  # fmt: skip
    assert math.isclose(makespan, events, rel_tol=1e-9)


def lines(most_alpha: float, most_beta: float) -> st.SearchStrategy[LinearCost]:
    return st.builds(
        LinearCost, alpha_seconds=st.floats(0.0, most_alpha), beta_seconds=st.floats(0.0, most_beta)
    )


wires = lines(1e-2, 1e-7)


@settings(deadline=None, max_examples=25)
@given(reduce=wires, gemm=lines(1e-2, 1e-11))
@example(reduce=SUM, gemm=GEMM)
@example(reduce=replace(SUM, alpha_seconds=0.0), gemm=GEMM)
def test_best_step_of_lines_is_the_best_of_all_simulated_degrees(
    reduce: LinearCost, gemm: LinearCost
) -> None:
    costs = TensorLines(sum_cost=reduce, gemm_cost=gemm)
    step = best_moe_step(workload=SUMMED, costs=costs, bounds=Bounds())
    times = times_by_hand(costs)
    assert (step.forward.seconds, step.backward.seconds) == pytest.approx(times[step.degree])
    assert step.seconds <= min(map(sum, times.values())) * (1 + 1e-9)
    assert step.overhead.seconds == 0.0


def test_best_step_of_measured_costs_is_within_noise_of_the_best() -> None:
    step = best_moe_step(workload=SUMMED, costs=MEASURED, bounds=Bounds())
    times = times_by_hand(MEASURED)
    assert (step.forward.seconds, step.backward.seconds) == pytest.approx(times[step.degree])
    assert sum(times[step.degree]) <= 1.01 * min(map(sum, times.values()))
    assert step.degree > 1


def test_overhead_is_the_gate_and_the_small_exchanges_around_the_experts() -> None:
    """The agreement, and the sum of the weights' gradients."""
    costs = TensorLines(gemm_cost=FREE, rows_seconds={"gate": 1e-9})
    overhead = best_moe_step(workload=SUMMED, costs=costs, bounds=Bounds()).overhead.seconds
    gate = 1e-9 * TOKENS * 16
    assert overhead == pytest.approx(gate + SUM.seconds(8) + SUM.seconds(4 * TOKENS * 2))


def test_what_is_on_the_critical_path_adds_up_to_the_phase() -> None:
    slow = replace(SUM, beta_seconds=4e-9)
    for costs in (TensorLines(), TensorLines(sum_cost=slow)):
        step = best_moe_step(workload=SUMMED, costs=costs, bounds=Bounds())
        for phase in (step.forward, step.backward):
            path = phase.critical_link_seconds + phase.critical_device_seconds
            assert path == pytest.approx(phase.seconds)


def test_one_rank_sends_nothing_and_several_need_measured_collectives() -> None:
    costs = TensorLines(group_size=99, has_points=True)
    alone = best_moe_step(workload=replace(SUMMED, world_size=1), costs=costs, bounds=Bounds())
    assert alone.degree == 1
    assert alone.forward.link_seconds == 0.0
    with pytest.raises(ProfileError, match="all_reduce"):
        best_moe_step(workload=SUMMED, costs=costs, bounds=Bounds())


def solved(workload: Workload, costs: LinearCosts, *, memory_bytes: int = 80 * 2**30) -> Plan:
    inputs = plan_inputs(
        layer=LAYER, world_size=RANKS, dtype=workload.dtype,
        constraints={"expert-parallel": "tensor"},
    )  # fmt: skip
    return solution(inputs, costs, device_memory_bytes=memory_bytes)


@pytest.mark.parametrize("costs", [TensorLines(), MEASURED], ids=["lines", "measured"])
def test_a_plan_is_the_best_step_and_its_timeline_takes_as_long(costs: TensorLines) -> None:
    plan = solved(SUMMED, costs)
    assert plan.workload == SUMMED
    assert plan.layout == Layout(expert_parallel="tensor", dp=1, ep=1, tp=RANKS, pp=1)
    assert plan_from_json(canonical_json(plan), "plan.json") == plan
    step = best_moe_step(workload=SUMMED, costs=costs, bounds=Bounds())
    degree = plan.decide(TOKENS).degree
    assert degree == step.degree
    assert plan.predicted.step_seconds == pytest.approx(step.seconds)
    timelines = plan_timelines(plan=plan, costs=costs)
    for phase, timeline in zip(PHASES, timelines, strict=True):
        assert timeline.makespan_seconds == pytest.approx(by_hand(costs, phase, degree))
        names = sorted(span.name.split()[0] for span in timeline.spans)
        assert names == ["experts"] * degree + ["sum"] * degree
    assert replace(plan.memory, peak_bytes=None) == layer_memory(workload=SUMMED, degree=degree)


def test_a_plan_keeps_its_id_and_reuses_no_memory() -> None:
    plan = solved(SUMMED, TensorLines())
    assert plan.id == TENSOR_PLAN_ID
    assert plan.terms is not None
    assert plan.terms.strategies == ()
    assert plan.terms.forward.seconds == plan.predicted.forward_seconds


def test_ranges_of_lines_hold_the_best_degrees_of_other_sizes() -> None:
    plan = solved(SUMMED, LinearCosts())
    for tokens in (1, 16, 700, 4095, 9000, 2**19):
        workload = replace(SUMMED, tokens_per_rank=tokens)
        best = best_moe_step(workload=workload, costs=LinearCosts(), bounds=Bounds())
        pinned = Bounds(forward_degree=plan.decide(tokens).degree)
        held = best_moe_step(workload=workload, costs=LinearCosts(), bounds=pinned)
        assert held.seconds <= best.seconds * (1 + 1e-3)


def test_more_chunks_than_are_best_are_taken_where_memory_binds_and_it_says_so() -> None:
    """In float32: narrower gradients are summed in float32 where there are several chunks."""
    slow_gemms = LinearCosts(gemm_cost=LinearCost(alpha_seconds=1.0, beta_seconds=1e-15))
    wide = replace(SUMMED, dtype="float32")
    roomy = solved(wide, slow_gemms)
    needed = roomy.memory.peak_bytes
    assert needed is not None
    assert roomy.pipeline.backward_degree == 1
    assert format_seconds(roomy.predicted.step_seconds) in roomy.decision.why
    tight = solved(wide, slow_gemms, memory_bytes=round(0.97 * needed))
    assert tight.pipeline.backward_degree > 1
    assert tight.decision.binding == "memory"
    assert format_bytes(needed) in tight.decision.why
    assert tight.memory.peak_bytes is not None
    assert tight.memory.peak_bytes <= 0.97 * needed
    with pytest.raises(InfeasiblePlanError, match="strategy none"):
        solved(SUMMED, slow_gemms, memory_bytes=2**30 // 10)


def test_no_row_is_sorted_by_its_sender_where_every_rank_has_all_rows() -> None:
    rows = 1000.0
    exchanged = layer_costs(workload=replace(SUMMED, expert_parallel="all_to_all"), costs=MEASURED)
    assert exchanged.sorting(rows).seconds == pytest.approx(1e-11 * rows * LAYER.d_model)
    assert layer_costs(workload=SUMMED, costs=MEASURED).sorting(rows).seconds == 0
