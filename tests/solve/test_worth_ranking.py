"""Degrees that are timed all at once, and those that a ranking keeps of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.constraints import Bounds, Order, Strategy
from moetune.domain.costs import LinearCost
from moetune.domain.layer import PHASES
from moetune.solve.layer.budget import MemoryBudget
from moetune.solve.layer.choose import DegreeChooser
from moetune.solve.layer.closed import closed_seconds
from moetune.solve.layer.parallelism import layer_costs
from moetune.solve.layer.ranking import order_of_steps, rank_degrees
from moetune.solve.layer.times import phase_time
from moetune.solve.layer.uncertainty import HOPELESS, NUM_CONTENDERS
from moetune.solve.layer.worth_ranking import (
    NUM_ALTERNATIVES,
    rounded,
    worth_ranking,
    worth_ranking_together,
)
from tests.solve.test_near_best import COSTS
from tests.solve.test_simulated import DEGREES, LAB, MACHINES, TOKENS

_OF_DEGREES = st.sampled_from([1.0, 1.0 + 1e-10, 1.0 + 1e-15, 1.05, 1.1, 1.3, 2.0])
times = st.lists(_OF_DEGREES, min_size=9, max_size=9).map(
    lambda found: dict(enumerate(found, start=1))
)


@pytest.mark.parametrize("machine", ["samples", "tables", "one rank"])
@pytest.mark.parametrize("order", ["dispatch_first", "interleaved"])
def test_all_degrees_at_once_take_as_long_as_one_by_one(machine: str, order: Order) -> None:
    costs, workload = MACHINES[machine]()
    layer = layer_costs(workload=workload, costs=costs)
    for tokens in TOKENS:
        for phase in PHASES:
            found = closed_seconds(
                costs=layer, phase=phase, tokens=tokens, degrees=DEGREES, order=order
            )
            alone = [
                phase_time(costs=layer, phase=phase, tokens=tokens, degree=one, order=order).seconds
                for one in DEGREES
            ]
            assert found == alone


@pytest.mark.parametrize("sharded", [True, False])
def test_a_tensor_parallel_group_is_timed_at_once_too(*, sharded: bool) -> None:
    costs, alone = MACHINES["tables"]()
    workload = replace(alone, expert_parallel="tensor", sequence_parallel=sharded)
    chooser = DegreeChooser(costs=layer_costs(workload=workload, costs=costs), bounds=Bounds())
    for phase in PHASES:
        found = chooser.seconds(phase, 4096)
        each = {one: chooser.time(phase, 4096, one).seconds for one in found}
        assert found == each


@given(forward=times, backward=times, chosen=st.integers(1, 9), none=st.integers(0, 9))
def test_what_a_ranking_is_asked_for_is_kept(
    forward: dict[int, float], backward: dict[int, float], chosen: int, none: int
) -> None:
    def fits(degree: int) -> bool:
        return degree != none

    found = worth_ranking_together(
        (forward, backward), fits, chosen=chosen, around_seconds=0.1, ties=True
    )
    steps = {one: forward[one] + backward[one] + 0.1 for one in forward}
    fitting = [one for one in forward if fits(one)]
    for seconds, most in ((forward, NUM_CONTENDERS), (backward, 4), (steps, NUM_ALTERNATIVES)):
        others = [one for one in fitting if one != chosen]
        assert {*sorted(others, key=lambda one: (rounded(seconds[one]), one))[:most]} <= found
    for one in fitting:
        is_power = one.bit_count() == 1
        assert one > 1 or one in found
        for seconds in (forward, backward):
            assert not is_power or seconds[one] > seconds[chosen] * HOPELESS or one in found
    assert found <= {*fitting}


def test_of_ties_the_fewest_chunks_are_kept() -> None:
    seconds = dict.fromkeys(range(1, 9), 1.0) | {4: 1 - 1e-15, 7: 1 - 1e-15}
    tied = worth_ranking(seconds, bool, chosen=3, ties=True)
    assert tied == {*range(1, 7), 8}
    untied = worth_ranking(seconds, bool, chosen=3, ties=False)
    assert untied == {*range(1, 6), 7, 8}


def test_absurd_costs_are_not_timed_at_once() -> None:
    absurd = LinearCost(alpha_seconds=1e308, beta_seconds=1e300)
    layer = layer_costs(workload=LAB, costs=replace(COSTS, transfer_cost=absurd))
    found = closed_seconds(
        costs=layer, phase="forward", tokens=4096, degrees=DEGREES, order="interleaved"
    )
    assert found is None


@pytest.mark.parametrize("machine", ["samples", "tables", "lines"])
@pytest.mark.parametrize("strategy", ["none", "S1", "S2"])
def test_a_ranking_begins_as_that_of_all_degrees(machine: str, strategy: Strategy) -> None:
    costs, workload = MACHINES[machine]()
    layer = layer_costs(workload=workload, costs=costs)
    budget = MemoryBudget.of(workload=workload, costs=layer, limit_bytes=2**60)
    bounds = Bounds(strategy=strategy)
    found = rank_degrees(costs=layer, bounds=bounds, budget=budget, strategy=strategy)
    assert found is not None
    every = range(1 if strategy == "none" else 2, bounds.max_degree + 1)
    for phase, ranked in zip(PHASES, (found.forward, found.backward), strict=True):
        times = [found.chooser.time(phase, found.tokens, one) for one in every]
        if strategy == "none":
            times.sort(key=lambda one: (one.seconds, one.degree))
        else:
            times.sort(key=lambda one: (rounded(one.seconds), one.degree))
        others = [one for one in times if one.degree != ranked[0].degree]
        if found.chooser.is_paired or strategy == "none":
            assert list(ranked[1 : 1 + NUM_CONTENDERS]) == others[:NUM_CONTENDERS]
        near = [one for one in others if one.seconds <= ranked[0].seconds * HOPELESS]
        assert {one.degree for one in near if one.degree.bit_count() == 1} <= {
            one.degree for one in ranked
        }
    steps = found.others()
    assert steps == sorted(steps, key=order_of_steps)
    if found.chooser.is_paired:
        best = found.best.degrees[0]
        equal = [
            found.step(*(found.chooser.time(phase, found.tokens, one) for phase in PHASES))
            for one in every
            if one != best
        ]
        assert steps[:4] == sorted(equal, key=order_of_steps)[:4]
