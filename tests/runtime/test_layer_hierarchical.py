"""Layers whose rows travel across nodes, then inside them."""

import dataclasses

import pytest

from moetune.domain.layer import LayerKey, LayerShape
from moetune.domain.plan import Decision
from moetune.runtime.plans.book import LayerPlans, PlanBook
from tests.ranks import run_ranks
from tests.runtime import hierarchical_workers as workers
from tests.runtime.plans import small_plan

LAYER = LayerShape(d_model=16, d_hidden=32, num_experts=4, top_k=2)
PLAN = small_plan(layer=LAYER, world_size=4, dispatcher="hierarchical")


@pytest.mark.parametrize("num_ranks", [4, 6])
def test_a_hierarchical_layer_computes_the_same_numbers(num_ranks: int) -> None:
    assert run_ranks(workers.hierarchical_layers_equal_flat_ones, num_ranks) == [""] * num_ranks


def test_a_plan_is_followed_and_refused_on_one_node() -> None:
    assert run_ranks(workers.a_plan_is_followed, 4, PLAN) == [""] * 4


def test_steps_of_both_exchanges_are_verified() -> None:
    assert run_ranks(workers.both_are_verified, 4, PLAN) == [""] * 4


def test_every_decision_of_a_plan_has_its_dispatcher() -> None:
    key: LayerKey = PLAN.workload.key
    book = PlanBook([PLAN])
    for tokens in (3, 40, 1000):
        assert book.decide(key, tokens_per_rank=tokens).dispatcher == "hierarchical"
    assert LayerPlans().decide(3) == Decision(forward_degree=1, backward_degree=1)
    flat = dataclasses.replace(PLAN, pipeline=dataclasses.replace(PLAN.pipeline, dispatcher="flat"))
    assert PlanBook([flat]).decide(key, tokens_per_rank=40).dispatcher == "flat"
