"""The chance that another choice is faster, on costs by hand."""

from dataclasses import replace

from moetune.domain.costs import LinearCost
from moetune.domain.layer import Workload
from moetune.domain.plan import Decision
from moetune.solve.layer.costs import LayerCosts, layer_costs
from moetune.solve.layer.times import step_time
from moetune.solve.layer.uncertainty import LayerChoice, chance_of_faster
from tests.solve.costs_by_hand import ALL_TO_ALL, GEMM, LinearCosts, plan_inputs


def choice(costs: LinearCosts, degree: int) -> LayerChoice:
    load = Workload(layer=plan_inputs().layer, world_size=8, tokens_per_rank=4096, dtype="bfloat16")
    return (
        layer_costs(workload=load, costs=costs),
        Decision(forward_degree=degree, backward_degree=degree),
    )


def seconds(costs: LayerCosts, decision: Decision) -> float:
    return step_time(
        costs=costs, tokens=4096, forward_degree=decision.forward_degree,
        backward_degree=decision.backward_degree,
    ).seconds  # fmt: skip


def test_a_chance_is_the_share_of_refits_in_which_the_other_one_is_shorter() -> None:
    own, other = choice(LinearCosts(), 1), choice(LinearCosts(), 16)
    # A start-up of 2 ms costs 16 chunks 15 times 4 ms more in each pass, and hides less than that.
    dear = LinearCost(alpha_seconds=2e-3, beta_seconds=ALL_TO_ALL.beta_seconds)
    free = LinearCost(alpha_seconds=0.0, beta_seconds=ALL_TO_ALL.beta_seconds)
    base = LinearCosts(gemm_cost=replace(GEMM, alpha_seconds=0.0))
    refits = [replace(base, transfer_cost=one) for one in (free, dear, free, free)]
    assert chance_of_faster(own, other, resamples=refits, tokens=4096) == 0.75
    assert chance_of_faster(other, own, resamples=refits, tokens=4096) == 0.25
    assert chance_of_faster(own, own, resamples=refits, tokens=4096) == 0.0
    alone = chance_of_faster(own, other, resamples=(), tokens=4096)
    assert alone == float(seconds(*other) < seconds(*own))
