"""The choice of a strategy and its terms, against brute force over every strategy and degree."""

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
from moetune.solve.layer.costs import layer_costs
from moetune.solve.layer.peak import peak_bytes
from moetune.solve.layer.strategies import choose_strategy
from tests.solve.costs_by_hand import LinearCosts, plan_inputs, solution
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
    inputs = plan_inputs(memory_limit_bytes=limit_bytes, layer=layer)
    return solution(inputs, costs, bounds, resamples=(costs,))


def workload() -> Workload:
    inputs = plan_inputs()
    return Workload(layer=inputs.layer, world_size=8, tokens_per_rank=4096, dtype=inputs.dtype)


BY_HAND = LayerByHand(
    d_model=1024, d_hidden=4096, num_experts=8, rows=8192, tokens=4096, exchange=(2e-4, 3e-10),
    gemm=(5e-5, 4e-14), copy=(1e-5, 5e-11),
)  # fmt: skip
ONE_EXPERT_A_RANK = LayerShape(d_model=1024, d_hidden=4096, num_experts=8, top_k=2)


def every_choice(by_hand: LayerByHand, limit_bytes: int) -> dict[tuple[Strategy, int], float]:
    """Return the seconds of every strategy and degree whose peak is within the limit."""
    return {
        (strategy, degree): by_hand.step_seconds(strategy, degree)
        for strategy, degree in itertools.product(STRATEGIES, range(1, 9))
        if peak_of(strategy, degree, layer=ONE_EXPERT_A_RANK) <= limit_bytes
    }


def peak_of(strategy: Strategy, degree: int, layer: LayerShape | None = None) -> int:
    """Return the peak on a GPU, whose kernels take the rows of all experts of a rank."""
    there = workload() if layer is None else replace(workload(), layer=layer)
    return peak_bytes(
        workload=there, degree=degree, strategy=strategy,
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
    st.tuples(st.sampled_from(STRATEGIES), st.integers(1, 8)).map(
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
    key = plan.memory.strategy, plan.decide(4096).degree
    assert key in choices
    assert plan.predicted.step_seconds == pytest.approx(choices[key], rel=1e-9)
    assert choices[key] <= min(choices.values()) * (1 + 1e-9)
    assert plan.memory.peak_bytes == peak_of(*key, layer=ONE_EXPERT_A_RANK) <= limit_bytes


@settings(max_examples=12, deadline=None)
@given(
    limit_bytes=peaks,
    pins=st.sampled_from([(None, None), (3, None), (None, 1), (5, 5)]),
    strategy=st.sampled_from([None, *STRATEGIES]),
)
def test_measured_choices_are_within_noise_of_brute_force(
    limit_bytes: int, pins: tuple[int | None, int | None], strategy: Strategy | None
) -> None:
    """Where one chunk fits, others have to be worth it, which is up to 5 % slower."""
    bounds = replace(SMALL, forward_degree=pins[0], backward_degree=pins[1], strategy=strategy)
    costs = replace(costs_of(BY_HAND), has_points=True)
    choices = {
        (name, degree): seconds
        for (name, degree), seconds in every_choice(BY_HAND, limit_bytes).items()
        if strategy in {None, name} and bounds.degree in {None, degree}
    }
    if not choices:
        with pytest.raises(InfeasiblePlanError, match="memory"):
            solve(costs, limit_bytes=limit_bytes, bounds=bounds, layer=ONE_EXPERT_A_RANK)
        return
    plan = solve(costs, limit_bytes=limit_bytes, bounds=bounds, layer=ONE_EXPERT_A_RANK)
    key = plan.memory.strategy, plan.decide(4096).degree
    assert key in choices
    assert choices[key] <= min(choices.values()) / (1 - WORTH) * (1 + 1e-9)


def test_what_does_not_fit_lost_for_that_and_memory_binds() -> None:
    plan = solve(limit_bytes=420 * MIB)
    assert plan.memory.strategy != "none"
    assert plan.pipeline.order == "interleaved"
    assert plan.decision.binding == "memory"
    kept = next(row for row in plan.alternatives if row.strategy == "none")
    assert kept.lost_because.startswith("does not fit: it peaks at ")
    assert kept.step_seconds < plan.predicted.step_seconds
    assert f"Strategy {plan.memory.strategy}" in plan.decision.why
    runner_up = plan.decision.runner_up
    assert runner_up is not None
    assert runner_up.step_seconds >= plan.predicted.step_seconds
    assert plan.decide(4096).strategy == plan.memory.strategy


def test_strategies_that_copy_need_measured_copies() -> None:
    costs = replace(COSTS, copy_mode=None, copy_cost=None)
    assert {row.strategy for row in solve(costs).alternatives} == {"none", "S4"}
    with pytest.raises(ProfileError, match="S1 copies to the host"):
        solve(costs, bounds=Bounds(strategy="S1"))


def test_a_pinned_order_that_needs_more_buffers_excludes_reuse() -> None:
    kept = solve(bounds=replace(SMALL, order="dispatch_first"))
    assert {row.strategy for row in kept.alternatives} == {"none"}
    with pytest.raises(InfeasiblePlanError, match="dispatch_first"):
        solve(bounds=Bounds(order="dispatch_first", strategy="S4"))


def test_pageable_memory_lowers_the_trust_and_is_warned_of() -> None:
    costs = replace(COSTS, copy_mode="pageable")
    plan = solve(costs, bounds=replace(SMALL, strategy="S1"))
    assert plan.predicted.trust == "modelled"
    assert any("pageable memory" in warning for warning in plan.warnings)
    pinned = solve(bounds=replace(SMALL, strategy="S1"))
    assert not any("pageable memory" in warning for warning in pinned.warnings)


def test_of_measured_strategies_that_noise_cannot_tell_apart_the_first_is_taken() -> None:
    """Where what is kept does not fit, and none of the others is a tenth of a percent behind."""
    surprises = 0
    for share in range(80, 121):
        copy = LinearCost(alpha_seconds=1e-5, beta_seconds=1.4e-10 * share / 100)
        costs = replace(
            COSTS, has_points=True, interference=Interference(), copy_cost=copy,
            transfer_cost=LinearCost(alpha_seconds=2e-4, beta_seconds=3.1e-10),
        )  # fmt: skip
        choice = choose_strategy(
            workload=workload(),
            costs=layer_costs(workload=workload(), costs=costs),
            bounds=SMALL,
            limit_bytes=420 * MIB,
        )
        times = {row.strategy: row.step.seconds for row in choice.contenders if row.fits}
        assert "none" not in times
        near = [name for name in times if times[name] <= 1.01 * min(times.values())]
        assert choice.best.strategy == near[0]
        surprises += times[near[0]] > min(times.values()) * (1 + 1e-6)
    assert surprises


DISTURBED = LinearCosts(
    interference=Interference(comm=CommSpeed(comp=0.8), comp=CompSpeed(comm=0.9)),
    copy_mode="pinned",
    copy_cost=LinearCost(alpha_seconds=1e-5, beta_seconds=1e-10),
)


@pytest.mark.parametrize(
    "bounds",
    [
        SMALL,
        replace(SMALL, order="interleaved"),
        replace(SMALL, forward_degree=3, order="interleaved"),
        replace(SMALL, strategy="S2"),
        replace(SMALL, strategy="S4", backward_degree=5),
        Bounds(strategy="none", max_degree=1),
    ],
)
def test_the_chosen_row_is_the_plan_itself(bounds: Bounds) -> None:
    plan = solution(bounds=bounds, costs=DISTURBED)
    assert plan.terms is not None
    (row,) = (strategy for strategy in plan.terms.strategies if strategy.is_chosen)
    assert row.strategy == plan.memory.strategy
    assert row.forward_degree == row.backward_degree == plan.decide(4096).degree
    assert row.step_seconds == plan.predicted.step_seconds
    assert row.needed_bytes == plan.memory.formula_bytes
    assert (row.fits, row.lost_because) == (True, "")


def test_phase_terms_add_up() -> None:
    plan = solution(bounds=SMALL, costs=DISTURBED)
    assert plan.terms is not None
    for terms, seconds in (
        (plan.terms.forward, plan.predicted.forward_seconds),
        (plan.terms.backward, plan.predicted.backward_seconds),
    ):
        assert terms.seconds == seconds
        assert terms.total_transfer_seconds == 2 * terms.degree * terms.transfer_seconds
        assert terms.total_compute_seconds == terms.degree * terms.compute_seconds
        work = terms.total_transfer_seconds + terms.total_compute_seconds
        assert terms.hidden_seconds == pytest.approx(work - terms.seconds)
