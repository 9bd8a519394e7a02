"""The price of a layer between sequence shards, against simulations and brute force."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moetune.domain.any_plan import plan_from_json
from moetune.domain.constraints import Bounds
from moetune.domain.costs import Costs, LinearCost
from moetune.domain.document import canonical_json
from moetune.domain.errors import InputError, ProfileError
from moetune.domain.interference import CommSpeed, CompSpeed, Interference
from moetune.domain.layer import PHASES, LayerShape, Workload
from moetune.domain.plan import Plan
from moetune.domain.samples import CollectiveOp
from moetune.solve.layer.memory import layer_memory
from moetune.solve.layer.plan import LayerProblem
from moetune.solve.predict import plan_timelines
from tests.solve.costs_by_hand import (
    GEMM,
    LinearCosts,
    best_moe_step,
    event_by_event,
    plan_inputs,
)

SUM = LinearCost(alpha_seconds=3e-5, beta_seconds=7e-10)
GATHER = LinearCost(alpha_seconds=5e-5, beta_seconds=6e-10)
SCATTER = LinearCost(alpha_seconds=1e-4, beta_seconds=2e-10)
LAYER = LayerShape(d_model=1024, d_hidden=4096, num_experts=16, top_k=2)
TOKENS, RANKS = 4096, 4
WORKLOAD = Workload(
    layer=LAYER, world_size=RANKS, tokens_per_rank=TOKENS, dtype="bfloat16",
    expert_parallel="tensor", sequence_parallel=True,
)  # fmt: skip
DISTURBED = Interference(comm=CommSpeed(comp=0.95), comp=CompSpeed(comm=0.9))
TENSOR_PLAN_ID = "9996a18e18b93cad292dd24106d0a325c43dade3d5411a03e3d6e9cc6114375b"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLines(LinearCosts):
    """A line of its own for each collective."""

    gather_cost: LinearCost = GATHER
    scatter_cost: LinearCost = SCATTER
    sum_cost: LinearCost = SUM

    def _line(self, op: CollectiveOp) -> LinearCost:
        lines: dict[CollectiveOp, LinearCost] = {
            "all_gather": self.gather_cost,
            "reduce_scatter": self.scatter_cost,
            "all_reduce": self.sum_cost,
        }
        return lines[op]


MEASURED = ShardLines(
    has_points=True, power=0.99, interference=DISTURBED,
    rows_seconds={
        "gelu": 1e-11, "gelu_backward": 2e-11, "gather": 1e-11, "scatter_add": 3e-11, "gate": 1e-9
    },
)  # fmt: skip


def by_hand(costs: ShardLines, phase: str, degree: int) -> float:
    """Simulate a phase of `WORKLOAD`: T/P·M·s bytes gathered first, T/r·M·s scattered a chunk."""
    pairs = TOKENS * 2 / RANKS / degree
    gathering = costs.gather_cost.seconds((TOKENS / RANKS * 1024 * 2) ** costs.power)
    t_s = costs.scatter_cost.seconds((TOKENS / degree * 1024 * 2) ** costs.power)
    num_gemms = 2 if phase == "forward" else 4
    t_e = num_gemms * costs.gemm_cost.seconds(pairs * 1024 * 4096)
    seconds = costs.rows_seconds
    if seconds:
        t_e += seconds["gelu"] * pairs * 4096
        t_e += (seconds["gather"] + seconds["scatter_add"]) * pairs * 1024
        if phase == "backward":
            t_e += seconds["gelu_backward"] * pairs * 4096 + seconds["gather"] * pairs * 1024
    return event_by_event(
        dispatch=[gathering] + [0.0] * (degree - 1), compute=[t_e] * degree,
        combine=[t_s] * degree,
        link_order=[(step, chunk) for step in "DC" for chunk in range(degree)],
        comm_speed=costs.interference.comm.comp, comp_speed=costs.interference.comp.comm,
    )  # fmt: skip


def lines(
    alpha: st.SearchStrategy[float], beta: st.SearchStrategy[float]
) -> st.SearchStrategy[LinearCost]:
    return st.builds(LinearCost, alpha_seconds=alpha, beta_seconds=beta)


wires = lines(st.floats(0.0, 1e-2), st.floats(0.0, 1e-7))


@settings(deadline=None, max_examples=25)
@given(wires, wires, lines(st.floats(0.0, 1e-2), st.floats(0.0, 1e-11)))
@example(GATHER, SCATTER, GEMM)
@example(GATHER, replace(SCATTER, alpha_seconds=0.0), GEMM)
def test_best_step_of_lines_is_the_best_of_all_simulated_degrees(
    gather: LinearCost, scatter: LinearCost, gemm: LinearCost
) -> None:
    costs = ShardLines(gather_cost=gather, scatter_cost=scatter, gemm_cost=gemm)
    step = best_moe_step(workload=WORKLOAD, costs=costs, bounds=Bounds())
    for phase, found in zip(PHASES, (step.forward, step.backward), strict=True):
        times = [by_hand(costs, phase, degree) for degree in range(1, 65)]
        assert found.seconds == pytest.approx(times[found.degree - 1], rel=1e-9)
        assert found.seconds <= min(times) * (1 + 1e-9)
    assert step.overhead.seconds == 0.0


def test_best_step_of_measured_costs_is_within_noise_of_the_best() -> None:
    step = best_moe_step(workload=WORKLOAD, costs=MEASURED, bounds=Bounds())
    for phase, found in zip(PHASES, (step.forward, step.backward), strict=True):
        times = [by_hand(MEASURED, phase, degree) for degree in range(1, 65)]
        assert found.seconds == pytest.approx(times[found.degree - 1])
        assert found.seconds <= 1.01 * min(times)
        assert found.degree > 1


def test_overhead_is_the_gate_of_a_shard_and_six_small_exchanges() -> None:
    free = LinearCost(alpha_seconds=0.0, beta_seconds=0.0)
    costs = ShardLines(gemm_cost=free, rows_seconds={"gate": 1e-9})
    step = best_moe_step(workload=WORKLOAD, costs=costs, bounds=Bounds())
    own_pairs = TOKENS // RANKS * 2
    forward = [
        GATHER.seconds(8), SUM.seconds(2 * 8 * 16), GATHER.seconds(8 * own_pairs),
        GATHER.seconds(4 * own_pairs),
    ]  # fmt: skip
    backward = [SCATTER.seconds(4 * TOKENS * 2), SUM.seconds(4 * 16 * 1024)]
    gate = 1e-9 * TOKENS / RANKS * 16
    assert step.overhead.seconds == pytest.approx(gate + sum(forward) + sum(backward))


def test_what_is_on_the_critical_path_adds_up_to_the_phase() -> None:
    slow = replace(SCATTER, beta_seconds=4e-9)
    for costs in (ShardLines(), ShardLines(scatter_cost=slow)):
        step = best_moe_step(workload=WORKLOAD, costs=costs, bounds=Bounds())
        for phase in (step.forward, step.backward):
            path = phase.critical_link_seconds + phase.critical_device_seconds
            assert path == pytest.approx(phase.seconds)
            assert phase.gathering.seconds == GATHER.seconds(TOKENS / RANKS * 1024 * 2)


def test_one_rank_gathers_nothing_and_several_need_both_collectives() -> None:
    one = best_moe_step(
        workload=replace(WORKLOAD, world_size=1), costs=ShardLines(), bounds=Bounds()
    )
    assert one.degrees == (1, 1)
    assert one.forward.link_seconds == 0.0
    with pytest.raises(ProfileError, match="reduce_scatter"):
        best_moe_step(
            workload=WORKLOAD, costs=ShardLines(group_size=99, has_points=True), bounds=Bounds()
        )


def test_only_a_tensor_parallel_group_has_shards() -> None:
    with pytest.raises(InputError, match="expert_parallel tensor"):
        replace(WORKLOAD, expert_parallel="all_to_all")


def solve(costs: Costs, **constraints: str) -> Plan:
    inputs = plan_inputs(
        layer=LAYER, world_size=RANKS, constraints={"expert-parallel": "tensor", **constraints}
    )
    return LayerProblem(
        inputs=inputs, costs=costs, resamples=(), bounds=Bounds(),
        device_memory_bytes=80 * 2**30, provenance="measured",
    ).solve().plan  # fmt: skip


@pytest.mark.parametrize("costs", [ShardLines(), MEASURED])
def test_a_plan_is_the_best_step_and_its_timeline_takes_as_long(costs: ShardLines) -> None:
    plan = solve(costs, **{"sequence-parallel": "true"})
    assert plan.workload == WORKLOAD
    assert plan_from_json(canonical_json(plan), "plan.json") == plan
    step = best_moe_step(workload=WORKLOAD, costs=costs, bounds=Bounds())
    assert (plan.pipeline.forward_degree, plan.pipeline.backward_degree) == step.degrees
    assert plan.predicted.step_seconds == pytest.approx(step.seconds)
    degrees = {"forward": plan.pipeline.forward_degree, "backward": plan.pipeline.backward_degree}
    for phase, timeline in zip(PHASES, plan_timelines(plan=plan, costs=costs), strict=True):
        assert timeline.makespan_seconds == pytest.approx(by_hand(costs, phase, degrees[phase]))
        names = [span.name.split()[0] for span in timeline.spans]
        assert names == ["gather", *["experts"] * degrees[phase], *["sum"] * degrees[phase]]
    assert replace(plan.memory, peak_bytes=None) == layer_memory(
        workload=WORKLOAD, forward_degree=step.degrees[0], backward_degree=step.degrees[1]
    )


def test_plans_without_shards_are_as_before() -> None:
    plan = solve(ShardLines())
    assert plan.id == TENSOR_PLAN_ID != solve(ShardLines(), **{"sequence-parallel": "true"}).id
    assert not plan.workload.sequence_parallel
    assert "sequence" not in canonical_json(plan)
    forward, _ = plan_timelines(plan=plan, costs=ShardLines())
    assert {span.name.split()[0] for span in forward.spans} == {"experts", "sum"}
