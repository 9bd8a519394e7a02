"""Layers whose rows travel across nodes, then inside them."""

import dataclasses

from moetune.domain.layer import LayerKey, LayerShape
from moetune.domain.plan import Decision
from moetune.runtime.plans.book import LayerPlans, PlanBook
from tests.ranks import run_ranks
from tests.runtime import hierarchical_workers as workers
from tests.runtime.plans import small_plan

LAYER = LayerShape(d_model=16, d_hidden=32, num_experts=4, top_k=2)
PLAN = small_plan(layer=LAYER, world_size=4, dispatcher="hierarchical")


def test_hierarchical_layers_compute_the_same_numbers_and_follow_plans() -> None:
    assert run_ranks(workers.every_check, 4, PLAN) == [""] * 4


def test_every_decision_of_a_plan_has_its_dispatcher() -> None:
    key: LayerKey = PLAN.workload.key
    book = PlanBook([PLAN])
    for tokens in (3, 40, 1000):
        assert book.decide(key, tokens_per_rank=tokens).dispatcher == "hierarchical"
    assert LayerPlans().decide(3) == Decision(forward_degree=1, backward_degree=1)
    flat = dataclasses.replace(PLAN, pipeline=dataclasses.replace(PLAN.pipeline, dispatcher="flat"))
    assert PlanBook([flat]).decide(key, tokens_per_rank=40).dispatcher == "flat"
