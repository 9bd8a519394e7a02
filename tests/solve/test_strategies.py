"""The choice of a strategy, against brute force over every strategy and degree."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.constraints import STRATEGIES, Bounds, Strategy
from moetune.domain.costs import LinearCost
from moetune.domain.errors import InfeasiblePlanError, ProfileError
from moetune.domain.interference import CommSpeed, CompSpeed, Interference, MemSpeed
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.plan import Plan
from moetune.solve.layer.choose import WORTH
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.peak import peak_bytes
from moetune.solve.layer.plan import LayerProblem
from moetune.solve.layer.strategies import choose_strategy
from tests.solve.costs_by_hand import LinearCosts, plan_inputs
from tests.solve.reuse_by_hand import LayerByHand

MIB = 2**20
SMALL = Bounds(max_degree=8)
COSTS = LinearCosts(
    copy_cost=LinearCost(alpha_seconds=1e-5, beta_seconds=5e-11),
    copy_mode="pinned",
    interference=Interference(
        comp=CompSpeed(comm=0.95, mem=0.98, all=0.9),
        comm=CommSpeed(comp=0.85, mem=0.8, all=0.7),
        mem=MemSpeed(comp=0.95, comm=0.8, all=0.75),
    ),
)


def solve(
    costs: LinearCosts = COSTS,
    *,
    limit_bytes: int | None = None,
    bounds: Bounds = SMALL,
    layer: LayerShape | None = None,
) -> Plan:
    return (
        LayerProblem(
            inputs=plan_inputs(memory_limit_bytes=limit_bytes, layer=layer),
            costs=costs,
            resamples=(costs,),
            bounds=bounds,
            device_memory_bytes=2**40,
            provenance="measured",
        )
        .solve()
        .plan
    )


def workload() -> Workload:
    inputs = plan_inputs()
    return Workload(layer=inputs.layer, world_size=8, tokens_per_rank=4096, dtype=inputs.dtype)


BY_HAND = LayerByHand(
    d_model=1024, d_hidden=4096, num_experts=8, rows=8192, tokens=4096, exchange=(2e-4, 3e-10),
    gemm=(5e-5, 4e-14), copy=(1e-5, 5e-11),
)  # fmt: skip
ONE_EXPERT_A_RANK = LayerShape(d_model=1024, d_hidden=4096, num_experts=8, top_k=2)


def every_choice(by_hand: LayerByHand, limit_bytes: int) -> dict[tuple[Strategy, int, int], float]:
    """Return the seconds of every strategy and degrees whose peak is within the limit."""
    grid = itertools.product(STRATEGIES, range(1, 9), range(1, 9))
    return {
        choice: by_hand.step_seconds(*choice)
        for choice in grid
        if peak_of(*choice, layer=ONE_EXPERT_A_RANK) <= limit_bytes
    }


def peak_of(
    strategy: Strategy, forward: int, backward: int, layer: LayerShape | None = None
) -> int:
    """Return the peak on a GPU, whose kernels take the rows of all experts of a rank."""
    there = workload() if layer is None else replace(workload(), layer=layer)
    return peak_bytes(
        workload=there, forward_degree=forward, backward_degree=backward, strategy=strategy,
        is_grouped=True,
    ).device_bytes  # fmt: skip


def costs_of(by_hand: LayerByHand) -> LinearCosts:
    return replace(
        COSTS,
        copy_cost=LinearCost(alpha_seconds=by_hand.copy[0], beta_seconds=by_hand.copy[1]),
        transfer_cost=LinearCost(
            alpha_seconds=by_hand.exchange[0], beta_seconds=by_hand.exchange[1]
        ),
        interference=Interference(),
    )


peaks = st.one_of(
    st.integers(225, 460).map(lambda mib: mib * MIB),
    st.tuples(st.sampled_from(STRATEGIES), st.integers(1, 8), st.integers(1, 8)).map(
        lambda choice: peak_of(*choice, layer=ONE_EXPERT_A_RANK)
    ),
)
"""Limits anywhere, and to the byte those of a choice."""


@settings(max_examples=12, deadline=None)
@given(
    limit_bytes=peaks,
    copy_beta=st.sampled_from([1e-12, 5e-11, 1e-9]),
    wire_beta=st.sampled_from([3e-11, 3e-10, 3e-9]),
)
def test_the_choice_is_that_of_brute_force(
    limit_bytes: int, copy_beta: float, wire_beta: float
) -> None:
    by_hand = replace(BY_HAND, copy=(1e-5, copy_beta), exchange=(2e-4, wire_beta))
    costs = costs_of(by_hand)
    choices = every_choice(by_hand, limit_bytes)
    if not choices:
        with pytest.raises(InfeasiblePlanError, match="memory"):
            solve(costs, limit_bytes=limit_bytes, layer=ONE_EXPERT_A_RANK)
        return
    plan = solve(costs, limit_bytes=limit_bytes, layer=ONE_EXPERT_A_RANK)
    pipeline = plan.pipeline
    key = plan.memory.strategy, pipeline.forward_degree, pipeline.backward_degree
    assert key in choices
    assert plan.predicted.step_seconds == pytest.approx(choices[key], rel=1e-9)
    assert choices[key] <= min(choices.values()) * (1 + 1e-9)
    assert plan.memory.peak_bytes == peak_of(*key, layer=ONE_EXPERT_A_RANK) <= limit_bytes


@settings(max_examples=12, deadline=None)
@given(
    limit_bytes=peaks,
    pins=st.sampled_from([(None, None), (3, None), (None, 1), (2, 5)]),
    strategy=st.sampled_from([None, *STRATEGIES]),
)
def test_measured_choices_are_within_noise_of_brute_force_over_as_many_chunks_in_both_phases(
    limit_bytes: int, pins: tuple[int | None, int | None], strategy: Strategy | None
) -> None:
    """Where one chunk fits, others have to be worth it, which is up to 5 % slower."""
    bounds = replace(SMALL, forward_degree=pins[0], backward_degree=pins[1], strategy=strategy)
    costs = replace(costs_of(BY_HAND), is_measured=True)
    one, other = (pins[0] or pins[1], pins[1] or pins[0])
    choices = {
        (name, forward, backward): seconds
        for (name, forward, backward), seconds in every_choice(BY_HAND, limit_bytes).items()
        if strategy in {None, name}
        and (forward == backward if one is None else (forward, backward) == (one, other))
    }
    if not choices:
        with pytest.raises(InfeasiblePlanError, match="memory"):
            solve(costs, limit_bytes=limit_bytes, bounds=bounds, layer=ONE_EXPERT_A_RANK)
        return
    plan = solve(costs, limit_bytes=limit_bytes, bounds=bounds, layer=ONE_EXPERT_A_RANK)
    pipeline = plan.pipeline
    key = plan.memory.strategy, pipeline.forward_degree, pipeline.backward_degree
    assert key in choices
    assert choices[key] <= min(choices.values()) / (1 - WORTH) * (1 + 1e-9)


def test_without_a_limit_that_binds_everything_is_kept_and_each_strategy_has_its_reason() -> None:
    plan = solve()
    assert plan.memory.strategy == "none"
    others = {one.strategy: one for one in plan.alternatives if one.strategy != "none"}
    assert set(others) == {"S1", "S2", "S3", "S4"}
    for one in others.values():
        assert one.step_seconds > plan.predicted.step_seconds
        assert one.order == "interleaved"
        assert one.lost_because.startswith("+")
    assert "copies" in others["S1"].lost_because
    assert "sends" in others["S4"].lost_because
    assert "computes" in others["S4"].lost_because


def test_what_does_not_fit_lost_for_that_and_memory_binds() -> None:
    plan = solve(limit_bytes=420 * MIB)
    assert plan.memory.strategy != "none"
    assert plan.pipeline.order == "interleaved"
    assert plan.decision.binding == "memory"
    kept = next(one for one in plan.alternatives if one.strategy == "none")
    assert kept.lost_because.startswith("does not fit: it peaks at ")
    assert kept.step_seconds < plan.predicted.step_seconds
    assert f"Strategy {plan.memory.strategy}" in plan.decision.why
    runner_up = plan.decision.runner_up
    assert runner_up is not None
    assert runner_up.step_seconds >= plan.predicted.step_seconds
    assert plan.decide(4096).strategy == plan.memory.strategy


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_pinned_strategy_is_kept(strategy: Strategy) -> None:
    undisturbed = replace(COSTS, interference=Interference())
    plan = solve(undisturbed, bounds=replace(SMALL, strategy=strategy), layer=ONE_EXPERT_A_RANK)
    assert plan.memory.strategy == strategy
    assert all(one.strategy == strategy for one in plan.alternatives)
    choices = every_choice(BY_HAND, 2**40)
    best = min(
        seconds
        for (name, forward, backward), seconds in choices.items()
        if name == strategy and (strategy == "none" or max(forward, backward) > 1)
    )
    assert plan.predicted.step_seconds == pytest.approx(best, rel=1e-9)


def test_a_strategy_forced_on_one_chunk_has_nothing_to_reuse() -> None:
    plan = solve(bounds=Bounds(forward_degree=1, backward_degree=1, strategy="S4"))
    assert plan.memory.strategy == "S4"
    assert plan.memory.saved_bytes == 0
    one = solve(bounds=Bounds(forward_degree=1, backward_degree=1, strategy="none"))
    assert plan.predicted.step_seconds == one.predicted.step_seconds
    two = solve(bounds=Bounds(forward_degree=2, backward_degree=2, strategy="S4"))
    assert two.memory.saved_bytes > 0


def test_strategies_that_copy_need_measured_copies() -> None:
    costs = replace(COSTS, copy_mode=None, copy_cost=None)
    assert {one.strategy for one in solve(costs).alternatives} == {"none", "S4"}
    with pytest.raises(ProfileError, match="S1 copies to the host"):
        solve(costs, bounds=Bounds(strategy="S1"))


def test_a_pinned_order_that_needs_more_buffers_excludes_reuse() -> None:
    kept = solve(bounds=replace(SMALL, order="dispatch_first"))
    assert {one.strategy for one in kept.alternatives} == {"none"}
    with pytest.raises(InfeasiblePlanError, match="dispatch_first"):
        solve(bounds=Bounds(order="dispatch_first", strategy="S4"))


def test_pageable_memory_lowers_the_trust_and_is_warned_of() -> None:
    costs = replace(COSTS, copy_mode="pageable")
    plan = solve(costs, bounds=replace(SMALL, strategy="S1"))
    assert plan.predicted.trust == "modelled"
    assert any("pageable memory" in warning for warning in plan.warnings)
    pinned = solve(bounds=replace(SMALL, strategy="S1"))
    assert not any("pageable memory" in warning for warning in pinned.warnings)


def test_measured_reuse_must_be_worth_it_where_one_chunk_fits() -> None:
    def chosen(wire_beta: float) -> Strategy:
        costs = replace(
            COSTS,
            is_measured=True,
            transfer_cost=LinearCost(alpha_seconds=1e-5, beta_seconds=wire_beta),
        )
        found = choose_strategy(
            workload=workload(),
            costs=layer_costs(workload=workload(), costs=costs),
            bounds=Bounds(max_degree=2),
            limit_bytes=peak_of("none", 1, 1),  # two take more: sums of gradients in float32
        )
        times = {one.strategy: one.step.seconds for one in found.contenders}
        assert found.contenders[0].step.degrees == (1, 1)
        saved = 1 - min(times.values()) / times["none"]
        assert saved > 0
        assert (found.best.strategy == "none") == (saved <= WORTH)
        return found.best.strategy

    assert chosen(7e-11) == "none"
    assert chosen(3e-10) != "none"


def test_of_measured_strategies_that_noise_cannot_tell_apart_the_first_is_taken() -> None:
    """Where what is kept does not fit, and none of the others is a tenth of a percent behind."""
    surprises = 0
    for share in range(80, 121):
        copy = LinearCost(alpha_seconds=1e-5, beta_seconds=1.4e-10 * share / 100)
        costs = replace(
            COSTS, is_measured=True, interference=Interference(), copy_cost=copy,
            transfer_cost=LinearCost(alpha_seconds=2e-4, beta_seconds=3e-10),
        )  # fmt: skip
        found = choose_strategy(
            workload=workload(),
            costs=layer_costs(workload=workload(), costs=costs),
            bounds=SMALL,
            limit_bytes=420 * MIB,
        )
        times = {one.strategy: one.step.seconds for one in found.contenders if one.fits}
        assert "none" not in times
        near = [name for name in times if times[name] <= 1.01 * min(times.values())]
        assert found.best.strategy == near[0]
        surprises += times[near[0]] > min(times.values()) * (1 + 1e-6)
    assert surprises


def test_ranges_of_a_reusing_plan_fit_as_far_as_any_degree_does() -> None:
    limit = 420 * MIB
    plan = solve(limit_bytes=limit)
    for low, high, forward, backward in plan.pipeline.ranges:
        for tokens in {low, min(high, 2 * low)}:
            if tokens == 4096 or max(forward, backward) == 8:
                continue
            peak = peak_bytes(
                workload=replace(workload(), tokens_per_rank=tokens),
                forward_degree=forward,
                backward_degree=backward,
                strategy=plan.memory.strategy,
            )
            assert peak.device_bytes <= limit, (tokens, forward, backward)


def test_copies_bind_where_they_take_longer_than_all_else() -> None:
    slow = replace(COSTS, copy_cost=LinearCost(alpha_seconds=1e-5, beta_seconds=5e-8))
    pinned = Bounds(strategy="S1", forward_degree=2, backward_degree=2)
    assert solve(slow, bounds=pinned).decision.binding == "copies"
    fast = replace(COSTS, copy_cost=LinearCost(alpha_seconds=1e-9, beta_seconds=1e-15))
    assert solve(fast, bounds=pinned).decision.binding == "communication"


def test_one_chunk_each_way_is_no_alternative_to_several_that_reuse_memory() -> None:
    plan = solve(bounds=Bounds(max_degree=2, strategy="S4"))
    found = {(one.forward_degree, one.backward_degree) for one in plan.alternatives}
    chosen = plan.pipeline.forward_degree, plan.pipeline.backward_degree
    assert found | {chosen} == {(1, 2), (2, 1), (2, 2)}
