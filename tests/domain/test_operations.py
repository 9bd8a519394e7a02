"""The operations of a plan's chunks, and the transfer that a phase's time stands for."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.errors import InputError
from moetune.domain.interference import Interference
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.operations import (
    Operation,
    OperationTimes,
    operations_of,
    predicted_seconds,
    transfer_seconds,
)
from moetune.domain.plan import Decision
from moetune.solve.layer.timeline import pipeline_tasks, simulate, tensor_parallel_tasks
from moetune.workflows.plan import make_plan
from tests.workflows.observed import PLAN, PROFILE, REQUEST

LAYER = LayerShape(d_model=8, d_hidden=16, num_experts=4, top_k=2)
DECISION = Decision(forward_degree=4, backward_degree=3)


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
        ("all_to_all", "backward", round(40 * 2 * 8 * 4 / 3), 3),
        ("experts", "backward", round(40 * 2 * 8 * 16 / 3), 3),
    ]


@pytest.mark.parametrize(
    ("shards", "name"), [(False, "all_reduce"), (True, "reduce_scatter")]
)  # fmt: skip
def test_tensor_parallel_ranks_sum_tokens_and_share_their_pairs(
    shards: bool,  # noqa: FBT001 - a case
    name: str,
) -> None:
    own = workload(expert_parallel="tensor", sequence_parallel=shards)
    assert named(operations_of(own, DECISION))[:2] == [
        (name, "forward", 40 * 8 * 4 // 4, 4),
        ("experts", "forward", 40 * 2 * 8 * 16 // 2 // 4, 4),
    ]


def test_one_rank_sends_nothing() -> None:
    assert {one.name for one in operations_of(workload(world_size=1), DECISION)} == {"experts"}


@given(
    degree=st.integers(1, 32),
    transfer=st.floats(1e-6, 1.0),
    compute=st.floats(1e-6, 1.0),
    order=st.sampled_from(["dispatch_first", "tensor"]),
)
def test_the_transfer_is_that_of_the_simulated_phase(
    degree: int, transfer: float, compute: float, order: str
) -> None:
    chunks = [transfer] * degree, [compute] * degree
    if order == "tensor":
        own = workload(expert_parallel="tensor")
        tasks = tensor_parallel_tasks(compute_seconds=chunks[1], reduce_seconds=chunks[0])
    else:
        own = workload()
        tasks = pipeline_tasks(
            dispatch_seconds=chunks[0], compute_seconds=chunks[1], combine_seconds=chunks[0],
            order="dispatch_first",
        )  # fmt: skip
    phase = simulate(tasks, interference=Interference()).makespan_seconds
    found = transfer_seconds(own, degree=degree, phase_seconds=phase, compute_seconds=compute)
    assert math.isclose(found, transfer, rel_tol=1e-6, abs_tol=1e-9)


@pytest.mark.parametrize(
    ("share", "degree", "phase", "compute", "transfer"),
    [
        ("all_to_all", 2, 8.0, 1.0, 2.0),  # the link is always busy: 8 = 2 · 2 · 2
        ("all_to_all", 2, 8.0, 3.0, 1.0),  # the experts are: 8 = 2 · 1 + 2 · 3
        ("tensor", 2, 5.0, 1.0, 2.0),  # 5 = 1 + 2 · 2
        ("tensor", 2, 5.0, 2.0, 1.0),  # 5 = 2 · 2 + 1
    ],
)
def test_the_transfer_of_phases_that_are_worked_out_by_hand(
    share: str, degree: int, phase: float, compute: float, transfer: float
) -> None:
    own = workload(expert_parallel=share)
    found = transfer_seconds(own, degree=degree, phase_seconds=phase, compute_seconds=compute)
    assert found == transfer


def test_a_plan_predicts_the_operations_of_its_own_degrees_alone() -> None:
    assert PLAN.terms is not None
    own = PLAN.decide(PLAN.tokens_per_rank)
    transfer, experts, *_ = operations_of(PLAN.workload, own)
    assert predicted_seconds(PLAN, transfer) == PLAN.terms.forward.transfer_seconds
    assert predicted_seconds(PLAN, experts) == PLAN.terms.forward.compute_seconds
    other = Decision(forward_degree=own.forward_degree + 1, backward_degree=own.backward_degree)
    assert predicted_seconds(PLAN, operations_of(PLAN.workload, other)[0]) is None
    assert make_plan(REQUEST, profile=PROFILE).terms == PLAN.terms


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
def test_times_are_positive_and_finite(wrong: float) -> None:
    operation = Operation(name="all_to_all", phase="forward", size=64, degree=2)
    makers: list[Callable[[], OperationTimes]] = [
        lambda: OperationTimes(operation=operation, predicted_seconds=None, seconds=(1.0, wrong)),
        lambda: OperationTimes(operation=operation, predicted_seconds=wrong, seconds=(1.0,)),
        lambda: OperationTimes(operation=operation, predicted_seconds=None, seconds=()),
    ]
    for make in makers:
        with pytest.raises(InputError, match="all_to_all"):
            make()


@pytest.mark.parametrize("field", ["size", "degree"])
def test_an_operation_has_a_size_and_chunks(field: str) -> None:
    values = {"size": 64, "degree": 2, field: 0}
    with pytest.raises(InputError, match=field):
        Operation(name="experts", phase="forward", **values)


def test_operations_name_what_they_are_of() -> None:
    one = Operation(name="all_to_all", phase="forward", size=2**21, degree=1)
    several = Operation(name="experts", phase="backward", size=2**21, degree=3)
    assert "all_to_all of 2.00 MiB" in one.words
    assert "3 chunks" in several.words
