"""The operations of a plan's chunks, and the transfer that a phase's time stands for."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.interference import Interference
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.operations import Operation, operations_of, predicted_seconds, transfer_seconds
from moetune.domain.plan import SAFE_DECISION
from moetune.solve.layer.timeline import pipeline_tasks, simulate, tensor_parallel_tasks
from tests.report.lab import lab_plan

LAYER = LayerShape(d_model=8, d_hidden=16, num_experts=4, top_k=2)
DECISION = SAFE_DECISION.with_degree(4)


def workload(**changes: object) -> Workload:
    values: dict[str, object] = {"layer": LAYER, "world_size": 2, "tokens_per_rank": 40}
    return Workload(**(values | changes))  # type: ignore[arg-type] # of any field


def named(found: tuple[Operation, ...]) -> list[tuple[str, str, int, int]]:
    return [(one.name, one.phase, one.size, one.degree) for one in found]


def test_tokens_travel_both_ways_and_experts_compute_their_rows() -> None:
    # 40 tokens, 2 choices, 8 values of 4 bytes; 8 x 16 MACs a row.
    assert named(operations_of(workload(), DECISION)) == [
        ("all_to_all", "forward", 40 * 2 * 8 * 4 // 4, 4),
        ("experts", "forward", 40 * 2 * 8 * 16 // 4, 4),
        ("all_to_all", "backward", 40 * 2 * 8 * 4 // 4, 4),
        ("experts", "backward", 40 * 2 * 8 * 16 // 4, 4),
    ]


@pytest.mark.parametrize(("shards", "name"), [(False, "all_reduce"), (True, "reduce_scatter")])
def test_tensor_parallel_ranks_sum_tokens_and_share_their_pairs(
    shards: bool,  # noqa: FBT001 - a case
    name: str,
) -> None:
    own = workload(expert_parallel="tensor", sequence_parallel=shards)
    assert named(operations_of(own, DECISION))[:2] == [
        (name, "forward", 40 * 8 * 4 // 4, 4),
        ("experts", "forward", 40 * 2 * 8 * 16 // 2 // 4, 4),
    ]


@given(degree=st.integers(1, 32), transfer=st.floats(1e-6, 1.0), compute=st.floats(1e-6, 1.0),
       order=st.sampled_from(["dispatch_first", "tensor"]))  # fmt: skip
def test_the_transfer_is_that_of_the_simulated_phase(
    degree: int, transfer: float, compute: float, order: str
) -> None:
    chunks = [transfer] * degree, [compute] * degree
    if order == "tensor":
        own = workload(expert_parallel="tensor")
        tasks = tensor_parallel_tasks(compute_seconds=chunks[1], reduce_seconds=chunks[0])
    else:
        own = workload()
        tasks = pipeline_tasks(dispatch_seconds=chunks[0], compute_seconds=chunks[1],
                               combine_seconds=chunks[0], order="dispatch_first")  # fmt: skip
    phase = simulate(tasks, interference=Interference()).makespan_seconds
    found = transfer_seconds(own, degree=degree, phase_seconds=phase, compute_seconds=compute)
    assert math.isclose(found, transfer, rel_tol=1e-6, abs_tol=1e-9)


def test_a_plan_predicts_the_operations_of_its_own_degree_alone() -> None:
    plan = lab_plan()
    assert plan.terms is not None
    own = plan.decide(plan.tokens_per_rank)
    transfer, experts, *_ = operations_of(plan.workload, own)
    assert predicted_seconds(plan, transfer) == plan.terms.forward.transfer_seconds
    assert predicted_seconds(plan, experts) == plan.terms.forward.compute_seconds
    other = own.with_degree(own.degree + 1)
    assert predicted_seconds(plan, operations_of(plan.workload, other)[0]) is None
