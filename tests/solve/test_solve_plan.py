"""A layer's plan: the degrees of brute force, its id, and the same digits each time."""

import hashlib
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from moetune.domain.any_plan import plan_from_json
from moetune.domain.constraints import Bounds
from moetune.domain.cost_keys import CostKey, GemmKey
from moetune.domain.costs import Estimate, LinearCost, Number
from moetune.domain.document import canonical_json, encode
from moetune.domain.errors import InfeasiblePlanError, InputError
from moetune.domain.interference import CommSpeed, CompSpeed, Interference
from moetune.domain.layer import LayerShape
from moetune.domain.plan import Plan
from moetune.domain.units import format_bytes
from tests.solve.costs_by_hand import LinearCosts, plan_inputs, solution

KEEP_ALL = Bounds(strategy="none")
MIB = 2**20
DISTURBED = Interference(comm=CommSpeed(comp=0.5), comp=CompSpeed(comm=0.5))
MEASURED = LinearCosts(
    has_points=True,
    power=0.98,
    alone_factor=1.5,
    interference=Interference(comm=CommSpeed(comp=0.8), comp=CompSpeed(comm=0.95)),
    rows_seconds={
        "gelu": 1e-11,
        "gelu_backward": 2e-11,
        "gather": 1e-11,
        "scatter_add": 2e-11,
        "gate": 1e-9,
        "gate_backward": 1e-9,
    },
)


class _FarGate(LinearCosts):
    """Costs that have not measured the gate's product, which has as many columns as experts."""

    __slots__ = ()

    def seconds(self, key: CostKey, size: Number) -> Estimate[Number]:
        estimate = super().seconds(key, size)
        is_gate = isinstance(key, GemmKey) and key.d_out == 16
        return estimate._replace(trust="extrapolated") if is_gate else estimate


def _solve(*inputs: Any, **options: Any) -> Plan:
    return solution(*inputs, **options)


@pytest.mark.parametrize("costs", [LinearCosts(), MEASURED])
def test_a_plan_survives_the_plan_file(costs: LinearCosts) -> None:
    plan = _solve(costs=costs, resamples=(costs, replace(costs, alone_factor=2.0)))
    text = canonical_json(plan)
    assert plan_from_json(text, "plan.json") == plan
    assert canonical_json(plan_from_json(text, "plan.json")) == text


def test_the_plans_id_is_the_hash_of_its_canonical_inputs() -> None:
    inputs = plan_inputs(constraints={"max_degree": "8"})
    plan = _solve(inputs, bounds=Bounds(max_degree=8))
    text = json.dumps(encode(inputs), sort_keys=True, separators=(",", ":"))
    assert plan.id == hashlib.sha256(text.encode()).hexdigest()
    assert plan.inputs == inputs


def test_the_same_inputs_give_the_same_plan_to_the_last_digit() -> None:
    resamples = (MEASURED, replace(MEASURED, power=0.97))
    assert canonical_json(_solve(costs=MEASURED, resamples=resamples)) == canonical_json(
        _solve(costs=MEASURED, resamples=resamples)
    )


def test_the_degree_is_that_of_brute_force_over_the_formula_of_the_design() -> None:
    plan = _solve()
    rows = 4096 * 2

    def phase(num_gemms: int, r: int) -> float:
        t_d = 2e-4 + 3e-10 * rows * 1024 * 2 / r * 29 / 30  # both experts on one rank: 1 of 15
        t_e = num_gemms * (5e-5 + 4e-14 * rows * 1024 * 4096 / r)
        return max(2 * r * t_d, 2 * t_d + r * t_e)

    times = {r: (phase(2, r), phase(4, r)) for r in range(1, 65)}
    best = min(times, key=lambda r: sum(times[r]))
    assert plan.pipeline.forward_degree == plan.pipeline.backward_degree == best
    predicted = plan.predicted
    assert (predicted.forward_seconds, predicted.backward_seconds) == pytest.approx(times[best])
    in_one_chunk = predicted.sequential_forward_seconds, predicted.sequential_backward_seconds
    assert in_one_chunk == pytest.approx(times[1])
    assert predicted.step_seconds == pytest.approx(sum(times[best]))
    assert predicted.overhead_seconds == 0.0


def test_layout_and_memory_are_those_of_one_layer_with_experts_spread_over_all_ranks() -> None:
    plan = _solve()
    assert encode(plan.layout) == {
        "expert_parallel": "all_to_all", "dp": 8, "ep": 8, "tp": 1, "pp": 1
    }  # fmt: skip
    assert plan.memory.strategy == "none"


@pytest.mark.parametrize("bounds", [Bounds(forward_degree=7), Bounds(backward_degree=7)])
def test_a_pin_of_one_phase_holds_for_both(bounds: Bounds) -> None:
    plan = _solve(bounds=bounds)
    assert plan.decide(4096).degree == 7
    assert all(row.forward_degree == row.backward_degree == 7 for row in plan.alternatives)
    assert any("pinned degree 7 makes the step" in warning for warning in plan.warnings)


def test_two_different_pins_are_refused_with_the_reason_and_what_works() -> None:
    with pytest.raises(InputError, match="--forward-degree 5 and --backward-degree 3") as caught:
        _solve(bounds=Bounds(forward_degree=5, backward_degree=3))
    assert "1 to 15 % slower" in caught.value.what
    assert caught.value.hint == "give one of them, which holds for both"


def test_a_pinned_order_is_kept_everywhere_and_costs_what_the_order_costs() -> None:
    plan = _solve(bounds=Bounds(order="interleaved"))
    assert plan.pipeline.order == "interleaved"
    assert {row.order for row in plan.alternatives} == {"interleaved"}
    free = _solve(bounds=Bounds(forward_degree=4))
    plan = _solve(bounds=Bounds(forward_degree=4, order="interleaved"))
    assert plan.predicted.step_seconds > free.predicted.step_seconds


def test_pinning_what_is_best_anyway_warns_of_nothing() -> None:
    free = _solve()
    bounds = Bounds(forward_degree=free.pipeline.forward_degree, strategy="none")
    plan = _solve(bounds=bounds)
    assert plan.warnings == ()
    assert plan.alternatives == ()
    assert plan.decision.runner_up is None


def test_one_rank_gets_one_chunk_and_a_reason() -> None:
    plan = _solve(plan_inputs(world_size=1))
    assert (plan.pipeline.forward_degree, plan.pipeline.backward_degree) == (1, 1)
    assert plan.pipeline.ranges == ((1, 2**20, 1, 1),)
    assert plan.decision.binding == "computation"
    assert "no transfer to hide" in plan.decision.why


def test_where_overlap_cannot_pay_one_chunk_is_chosen_and_the_plan_says_why() -> None:
    plan = _solve(costs=LinearCosts(interference=DISTURBED))
    assert (plan.pipeline.forward_degree, plan.pipeline.backward_degree) == (1, 1)
    assert plan.decision.why.startswith("Overlapping cannot pay here: ")
    assert "transfers run at 50 % of their speed and experts at 50 %" in plan.decision.why
    assert plan.alternatives[0].step_seconds > plan.predicted.step_seconds


@pytest.mark.parametrize(("gate_seconds", "trust"), [(1e-13, "measured"), (1e-7, "extrapolated")])
def test_what_lies_around_the_pipeline_decides_the_trust_only_where_it_is_long(
    gate_seconds: float, trust: str
) -> None:
    rows = {**MEASURED.rows_seconds, "gate": gate_seconds, "gather": 0.0, "scatter_add": 0.0}
    costs = _FarGate(has_points=True, rows_seconds=rows)
    plan = _solve(costs=costs)
    share = plan.predicted.overhead_seconds / plan.predicted.step_seconds
    assert (share > 0.05) == (trust == "extrapolated")
    assert share > 0
    assert plan.predicted.trust == trust


def test_alternatives_are_the_next_best_and_one_chunk_each_with_its_reason() -> None:
    plan = _solve(bounds=KEEP_ALL)
    seconds = [row.step_seconds for row in plan.alternatives]
    assert len(plan.alternatives) == 5
    assert seconds == sorted(seconds)
    assert seconds[0] >= plan.predicted.step_seconds
    degrees = [row.forward_degree for row in plan.alternatives]
    assert len(set(degrees)) == 5
    assert plan.pipeline.forward_degree not in degrees
    for row in plan.alternatives:
        slower = row.step_seconds / plan.predicted.step_seconds - 1
        assert row.lost_because.startswith(f"+{100 * slower:.1f} %: ")
    runner_up = plan.decision.runner_up
    assert runner_up is not None
    assert runner_up.forward_degree == runner_up.backward_degree == degrees[0]


def test_a_tie_goes_to_fewer_chunks_and_is_called_a_tie() -> None:
    # The link alone decides and has no start-up: from two chunks on all are as fast.
    costs = LinearCosts(
        transfer_cost=LinearCost(alpha_seconds=0.0, beta_seconds=1e-6),
        gemm_cost=LinearCost(alpha_seconds=1e-9, beta_seconds=1e-18),
    )
    plan = _solve(costs=costs)
    assert (plan.pipeline.forward_degree, plan.pipeline.backward_degree) == (2, 2)
    assert plan.alternatives[0].lost_because == "as fast, in more or fewer chunks"


@pytest.mark.parametrize(
    ("bounds", "tokens", "message", "hint"),
    [
        (
            Bounds(forward_degree=16),
            8,
            "8 tokens per rank in chunks of at least 1 make at most 8",
            "nearest: --forward-degree 8, or 16 tokens",
        ),
        (
            Bounds(backward_degree=128),
            4096,
            "max_degree is 64",
            "nearest: --backward-degree 64, or allow more with --max-degree 128",
        ),
    ],
)
def test_an_infeasible_pin_names_the_bound_and_the_nearest_degree(
    bounds: Bounds, tokens: int, message: str, hint: str
) -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        _solve(plan_inputs(tokens_per_rank=tokens), bounds=bounds)
    pin = bounds.forward_degree or bounds.backward_degree
    assert caught.value.what.endswith(f"_degree {pin} is infeasible: {message}")
    assert caught.value.hint == hint


def _peak_bytes(plan: Plan) -> int:
    assert plan.memory.peak_bytes is not None
    return plan.memory.peak_bytes


def test_a_limit_below_the_peak_of_the_fastest_choice_forces_another_and_binds() -> None:
    free = _solve()
    limit = _peak_bytes(free) - 1
    plan = _solve(plan_inputs(memory_limit_bytes=limit), bounds=KEEP_ALL)
    assert plan.predicted.step_seconds > free.predicted.step_seconds
    assert plan.decision.binding == "memory"
    assert plan.decision.why.startswith("Memory binds: ")
    assert format_bytes(_peak_bytes(free)) in plan.decision.why
    assert _peak_bytes(plan) <= limit
    assert _peak_bytes(plan) > plan.memory.state_bytes + plan.memory.activation_bytes


def test_the_devices_memory_is_the_limit_where_none_is_set() -> None:
    most = Bounds(forward_degree=64, strategy="none")
    least = _peak_bytes(_solve(bounds=most))
    plan = _solve(device_memory_bytes=least, bounds=KEEP_ALL)
    assert (plan.pipeline.forward_degree, plan.pipeline.backward_degree) == (64, 64)
    with pytest.raises(InfeasiblePlanError, match="memory"):
        _solve(device_memory_bytes=least - 1, bounds=KEEP_ALL)
    with pytest.raises(InfeasiblePlanError, match="the limit of 0 B"):
        _solve(plan_inputs(memory_limit_bytes=0))


def test_too_little_memory_names_the_numbers_and_the_nearest_number_of_tokens() -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        _solve(plan_inputs(memory_limit_bytes=400 * MIB), bounds=KEEP_ALL)
    # States: 16·(16·M + 2·2·H·M) bytes and biases. Saved, 2 bytes a value: 2·T·M, and M and H of
    # N = 2·T pairs. Buffers: 2·T·M, N·M and 3 of 29/30 of it, which travel, one weight and 2
    # bytes more of each for sums in float32, 2·H of a chunk of N/64 rows, and routing data of 0.8
    # MiB.
    assert caught.value.what == (
        "memory binds: the smallest plan (64 chunks, strategy none) peaks at 474 MiB per "
        "device (states 256 MiB, activations 96.0 MiB, buffers 121 MiB), 73.6 MiB more than the "
        "limit of 400 MiB"
    )
    # Reuse would do: with 64 chunks little more than the rows of the ranks themselves is left.
    assert caught.value.hint == "nearest: 64 chunks with strategy S4"
    plan = _solve(plan_inputs(memory_limit_bytes=400 * MIB))
    assert plan.memory.strategy == "S4"
    assert _peak_bytes(plan) <= 400 * MIB


def test_where_not_even_reuse_fits_the_nearest_number_of_tokens_does() -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        _solve(plan_inputs(memory_limit_bytes=290 * MIB))
    words = caught.value.hint.split()
    assert caught.value.hint == f"nearest: {words[1]} tokens per rank instead of 4096"
    fits = plan_inputs(memory_limit_bytes=290 * MIB, tokens_per_rank=int(words[1]))
    assert _peak_bytes(_solve(fits)) <= 290 * MIB
    more = plan_inputs(memory_limit_bytes=290 * MIB, tokens_per_rank=int(words[1]) + 1)
    with pytest.raises(InfeasiblePlanError):
        _solve(more)


@pytest.mark.unmeasured
def test_states_that_do_not_fit_alone_name_the_ranks_that_do() -> None:
    with pytest.raises(InfeasiblePlanError, match="allow more memory, or take a smaller layer"):
        _solve(plan_inputs(memory_limit_bytes=1_000_000))
    layer = LayerShape(d_model=1024, d_hidden=4096, num_experts=64, top_k=1)
    limit = 600 * MIB

    def solved_on(ranks: int) -> Plan:
        inputs = plan_inputs(
            layer=layer, world_size=ranks, tokens_per_rank=64, memory_limit_bytes=limit
        )
        return _solve(inputs, costs=LinearCosts(group_size=ranks))

    with pytest.raises(InfeasiblePlanError) as caught:
        solved_on(8)
    match = re.search(r"on (\d+) ranks \(--world-size \1\)$", caught.value.hint)
    assert match is not None
    ranks = int(match[1])
    assert _peak_bytes(solved_on(ranks)) <= limit
    with pytest.raises(InfeasiblePlanError):
        solved_on(ranks // 2)


def test_a_published_profile_is_modelled_and_says_that_it_is_not_this_machine() -> None:
    plan = _solve(provenance="published", resamples=(LinearCosts(),))
    assert plan.predicted.trust == "modelled"
    assert any("published profile 'by-hand', not from your machine" in w for w in plan.warnings)
    assert any("an error of 5 %" in warning for warning in plan.warnings)


def test_trust_is_that_of_the_worst_number_and_is_warned_of() -> None:
    assert _solve(costs=MEASURED).predicted.trust == "measured"
    assert _solve(costs=MEASURED).warnings == ()
    far = _solve(costs=replace(MEASURED, trust="extrapolated"))
    assert far.predicted.trust == "extrapolated"
    assert any("extrapolated: run `moetune profile --preset full`" in w for w in far.warnings)
    near = _solve(costs=replace(MEASURED, trust="modelled"))
    assert any("modelled from similar operations" in warning for warning in near.warnings)
