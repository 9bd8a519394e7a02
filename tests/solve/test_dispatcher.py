"""The choice between flat and hierarchical exchanges."""

from dataclasses import replace

import pytest

from moetune.domain.constraint_texts import decode_constraints, encode_constraints, parse_dispatcher
from moetune.domain.constraints import Bounds, Constraints, Dispatcher
from moetune.domain.costs import LinearCost
from moetune.domain.document import canonical_json, encode
from moetune.domain.errors import InputError, ProfileError
from moetune.domain.layer import LayerShape
from moetune.domain.plan import Decision, Plan, plan_from_json
from moetune.domain.request import PlanRequest
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.plan import solve_plan
from moetune.solve.predict import plan_step, plan_timelines
from tests.solve.costs_by_hand import ALL_TO_ALL, LinearCosts, plan_inputs

FAST = LinearCost(
    alpha_seconds=ALL_TO_ALL.alpha_seconds / 4, beta_seconds=ALL_TO_ALL.beta_seconds / 2
)
MEASURED = LinearCosts(two_step_cost=FAST, rows_seconds={"gate": 1e-12})


def solve(costs: LinearCosts, dispatcher: Dispatcher | None = None) -> Plan:
    bounds = Bounds(dispatcher=dispatcher, strategy="none")
    texts = encode_constraints(Constraints(bounds=bounds))
    return solve_plan(
        inputs=plan_inputs(constraints=texts), costs=costs, resamples=(costs,), bounds=bounds,
        device_memory_bytes=80 * 2**30, provenance="measured",
    ).plan  # fmt: skip


def test_the_faster_exchange_is_chosen_and_the_other_one_listed_with_its_time() -> None:
    plan = solve(MEASURED)
    flat = solve(replace(MEASURED, two_step_cost=None))

    assert plan.pipeline.dispatcher == "hierarchical"
    assert plan.decide(plan.tokens_per_rank).dispatcher == plan.decide(7).dispatcher
    assert flat.pipeline.dispatcher == "flat"
    assert plan.predicted.step_seconds < 0.95 * flat.predicted.step_seconds
    (other,) = (one for one in plan.alternatives if one.dispatcher == "flat")
    assert other.step_seconds == flat.predicted.step_seconds
    assert other.lost_because.startswith("+")
    assert plan_from_json(canonical_json(plan), "plan") == plan


def test_each_exchange_is_priced_by_its_own_curve() -> None:
    plan = solve(MEASURED)
    exchange = LinearCosts(transfer_cost=FAST, rows_seconds={"gate": 1e-12})
    alone = solve(exchange)

    assert plan.pipeline == replace(alone.pipeline, dispatcher="hierarchical")
    # One small exchange more, of the rows that pass through, and one flat one dearer.
    num_bytes = 16 * 8
    more = ALL_TO_ALL.seconds(num_bytes)
    assert plan.predicted.overhead_seconds - alone.predicted.overhead_seconds == pytest.approx(more)
    assert plan_step(plan=plan, costs=MEASURED).seconds == plan.predicted.step_seconds
    flat = replace(plan.decide(plan.tokens_per_rank), dispatcher="flat")
    assert plan_step(plan=plan, costs=MEASURED, decision=flat).seconds > plan.predicted.step_seconds
    forward, backward = plan_timelines(plan=plan, costs=MEASURED)
    assert forward.makespan_seconds == pytest.approx(plan.predicted.forward_seconds)
    assert backward.makespan_seconds == pytest.approx(plan.predicted.backward_seconds)


def test_a_small_gain_is_not_worth_the_second_step() -> None:
    close = LinearCost(
        alpha_seconds=0.97 * ALL_TO_ALL.alpha_seconds, beta_seconds=0.97 * ALL_TO_ALL.beta_seconds
    )
    plan = solve(LinearCosts(two_step_cost=close))

    assert plan.pipeline.dispatcher == "flat"
    (other,) = (one for one in plan.alternatives if one.dispatcher == "hierarchical")
    assert other.lost_because.endswith("within what predictions miss")


def test_what_was_not_measured_or_only_modelled_is_not_chosen() -> None:
    for costs in (LinearCosts(), replace(MEASURED, trust="modelled")):
        plan = solve(costs)
        assert plan.pipeline.dispatcher == "flat"
        assert all(one.dispatcher == "flat" for one in plan.alternatives)
    with pytest.raises(ProfileError, match="no all_to_all_2d measured"):
        solve(LinearCosts(), "hierarchical")


@pytest.mark.parametrize("dispatcher", ["flat", "hierarchical"])
def test_a_pin_is_kept(dispatcher: Dispatcher) -> None:
    plan = solve(MEASURED, dispatcher)
    assert plan.pipeline.dispatcher == dispatcher
    assert plan.inputs.constraints["dispatcher"] == dispatcher
    assert all(one.dispatcher == dispatcher for one in plan.alternatives)


def test_a_flat_plan_is_written_as_before() -> None:
    plan = solve(replace(MEASURED, two_step_cost=None))
    assert "dispatcher" not in canonical_json(plan)
    assert "dispatcher" not in encode(Decision(forward_degree=1, backward_degree=1))
    assert plan_from_json(canonical_json(plan), "plan").pipeline.dispatcher == "flat"


def test_pins_that_no_plan_can_have_are_refused_by_name() -> None:
    layer = LayerShape(d_model=64, d_hidden=256, num_experts=8, top_k=2)
    tensor = decode_constraints({"expert-parallel": "tensor", "dispatcher": "hierarchical"})
    with pytest.raises(InputError, match="dispatcher hierarchical excludes"):
        PlanRequest(layer=layer, world_size=4, tokens_per_rank=64, constraints=tensor)
    whole = decode_constraints({"dispatcher": "hierarchical"})
    with pytest.raises(InputError, match="dispatcher hierarchical is for one layer, and this is"):
        PlanRequest(model="ppmoe-6.7b", world_size=32, constraints=whole)
    with pytest.raises(InputError, match="dispatcher must be one of flat, hierarchical"):
        decode_constraints({"dispatcher": "2d"})


def test_tensor_parallel_layers_have_no_hierarchical_exchange() -> None:
    load = plan_inputs(constraints={"expert-parallel": "tensor"})
    bounds = Bounds(strategy="none")
    plan = solve_plan(
        inputs=load, costs=MEASURED, resamples=(), bounds=bounds,
        device_memory_bytes=80 * 2**30, provenance="measured",
    ).plan  # fmt: skip
    assert plan.pipeline.dispatcher == "flat"
    work = plan_inputs().workload(plan.layout)
    assert layer_costs(workload=work, costs=MEASURED).dispatcher == "flat"


@pytest.mark.parametrize("name", ["symmetric_memory", "deep_ep"])
def test_dispatchers_that_nobody_ran_are_refused_by_name(name: str) -> None:
    with pytest.raises(InputError, match=f"--dispatcher {name} is not supported: ") as refused:
        parse_dispatcher(name)
    assert "take flat or hierarchical" in str(refused.value.hint)
    with pytest.raises(InputError, match=f"constraints.dispatcher {name} is not supported"):
        decode_constraints({"dispatcher": name})
    with pytest.raises(InputError, match="must be one of flat, hierarchical, got 'fast'"):
        parse_dispatcher("fast")
