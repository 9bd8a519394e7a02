"""Overlaps of two batches that a search may try: what is left out, and what its times decide."""

from dataclasses import replace

import pytest

from moetune.domain.constraints import Strategy
from moetune.domain.layer import LayerShape
from moetune.domain.plan import Decision, Plan
from moetune.domain.training import StepOverlap
from moetune.solve.layer.peak import peak_bytes
from moetune.solve.layer.step_overlaps import (
    PlannedCall,
    best_overlap,
    next_overlap,
    step_overlaps,
)
from moetune.solve.layout.plan import solve_layout
from tests.runtime.plans import small_plan
from tests.solve.test_two_batches import on_cpus

SHAPE = LayerShape(d_model=8, d_hidden=16, num_experts=4, top_k=2)
TOKENS = 40


def call(
    plan: Plan | None = None, *, degrees: tuple[int, int] = (4, 3), strategy: Strategy = "none"
) -> PlannedCall:
    forward, backward = degrees
    decision = Decision(forward_degree=forward, backward_degree=backward, strategy=strategy)
    plan = plan or small_plan(layer=SHAPE)
    return PlannedCall(plan=plan, tokens_per_rank=TOKENS, decision=decision)


def with_limit(num_bytes: int) -> Plan:
    plan = small_plan(layer=SHAPE)
    inputs = replace(plan.inputs, memory_limit_bytes=num_bytes)
    return replace(plan, id=inputs.plan_id, inputs=inputs)


def test_turns_and_chunks_are_tried_each_alone_and_together() -> None:
    assert step_overlaps([call(), call(degrees=(1, 1))]) == ("both", "batch", "chunks")


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (call(degrees=(1, 1)), "there is nothing to join"),
        (call(strategy="S4"), "one chunk has nothing to reuse"),
        (call(small_plan(layer=SHAPE, constraints={"forward-degree": "4"})), "degrees are pinned"),
    ],
)
def test_chunks_are_joined_only_where_that_is_another_decision(one: PlannedCall, why: str) -> None:
    assert step_overlaps([one]) == ("both", "chunks"), why


def test_chunks_are_joined_only_where_one_fits() -> None:
    plan = small_plan(layer=SHAPE)
    workload = replace(plan.workload, tokens_per_rank=int(TOKENS * (1 + 1 / 16)))
    peak = peak_bytes(workload=workload, forward_degree=1, backward_degree=1).device_bytes
    assert "batch" in step_overlaps([call(with_limit(peak))])
    assert "batch" not in step_overlaps([call(with_limit(peak - 1))])


@pytest.mark.parametrize(
    ("pinned", "options"),
    [("batch", ("both", "batch")), ("chunks", ("chunks",)), ("none", ("chunks",))],
)
def test_what_a_plan_pins_is_not_searched(pinned: str, options: tuple[str, ...]) -> None:
    assert (
        step_overlaps([call(small_plan(layer=SHAPE, constraints={"overlap": pinned}))]) == options
    )


def test_the_overlap_of_a_whole_models_plan_comes_first() -> None:
    slow = solve_layout(on_cpus(between=3e9, seconds_per_mac=1e-12)).plan
    fast = solve_layout(on_cpus()).plan
    for plan, is_in_turns in ((slow, True), (fast, False)):
        assert plan.transformer is not None
        assert (plan.transformer.batches_in_flight == 2) is is_in_turns
        assert (step_overlaps([call(plan)])[0] == "chunks") is not is_in_turns


def search(seconds: dict[StepOverlap, list[float]]) -> tuple[StepOverlap, list[StepOverlap]]:
    """Return the best of some overlaps, the first of which is the plan's, and all steps."""
    tried: dict[StepOverlap, list[float]] = {}
    steps = []
    while (wanted := next_overlap(tuple(seconds), tried)) is not None:
        found = tried.setdefault(wanted, [])
        found.append(seconds[wanted][len(found)])
        steps.append(wanted)
    return best_overlap(tried), steps


def test_the_fastest_stays_and_what_is_clearly_slower_is_left_early() -> None:
    best, steps = search(
        {"both": [1.0, 1.1, 0.9, 1.0], "batch": [1.2, 1.3], "chunks": [0.7, 1.9, 0.8, 0.7]}
    )
    assert best == "chunks"
    assert [steps.count(one) for one in ("both", "batch", "chunks")] == [4, 2, 4]


def test_the_plans_overlap_stays_where_another_gains_less_than_a_percent() -> None:
    assert search({"both": [1.0] * 4, "chunks": [0.995] * 4})[0] == "both"
    assert search({"both": [1.0] * 4, "chunks": [0.985] * 4})[0] == "chunks"
