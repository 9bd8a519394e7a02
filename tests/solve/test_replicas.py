"""Replicas of hot experts: searched against every placement there is, priced, and taken or not."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.document import canonical_json
from moetune.domain.layer import LayerShape
from moetune.domain.placement import EMPTY, check_places, replicas_of
from moetune.domain.plan import Plan, plan_from_json
from moetune.domain.routing import BALANCED, ExpertLoads
from moetune.fit.costs import costs_of
from moetune.solve.layer.expert_groups import group_replicas
from moetune.solve.layer.replica_search import search_replicas
from moetune.solve.predict import plan_step
from moetune.workflows.layer_sensitivity import LayerSubject
from tests.solve.test_placed import LAYER, PROFILE, STEEP, planned

FARTHEST, MEAN = 1.25, 1.02
"""Fullest rank's rows over the least that any placement has, at most and in the mean."""


def least(shares: Sequence[float], ranks: int, places: int) -> float:
    """Return the least rows of the fullest rank, over all sets of ranks for each expert."""
    sets = [one for n in range(1, ranks + 1) for one in itertools.combinations(range(ranks), n)]
    ordered, best = sorted(shares, reverse=True), float("inf")

    def place(at: int, sums: tuple[float, ...], used: tuple[int, ...]) -> None:
        nonlocal best
        if max(sums) >= best or max(used) > places:
            return
        if at == len(ordered):
            best = max(sums)
            return
        for one in sets:
            place(
                at + 1,
                tuple(x + ordered[at] / len(one) * (r in one) for r, x in enumerate(sums)),
                tuple(x + (r in one) for r, x in enumerate(used)),
            )

    place(0, (0.0,) * ranks, (0,) * ranks)
    return best


def fullest(shares: Sequence[float], experts: Sequence[int], ranks: int) -> float:
    """Return the rows of the fullest rank, counted place by place."""
    numbers, each = [list(experts).count(e) for e in range(len(shares))], len(experts) // ranks
    rows = [0.0 if one == EMPTY else shares[one] / numbers[one] for one in experts]
    return max(sum(rows[rank * each : (rank + 1) * each]) for rank in range(ranks))


@st.composite
def loads_and_ranks(draw: st.DrawFn) -> tuple[list[float], int]:
    ranks, local = draw(st.sampled_from([(2, 2), (2, 3), (3, 1), (3, 2), (4, 1)]))
    some = st.one_of(st.floats(1e-3, 1.0), st.sampled_from([1.0, 2.0, 10.0]))
    loads = draw(st.lists(some, min_size=ranks * local, max_size=ranks * local))
    return [one / sum(loads) for one in loads], ranks


@given(case=loads_and_ranks())
@settings(deadline=None, max_examples=60)
def test_the_search_comes_near_the_best_of_all_placements(case: tuple[list[float], int]) -> None:
    shares, ranks = case
    (found,) = search_replicas(shares, ranks, most_added=1, price=lambda _, skew: skew)
    check_places(found.experts, len(shares), ranks)
    assert found.skew / ranks == pytest.approx(fullest(shares, found.experts, ranks))
    assert found.num_replicas == sum(one != EMPTY for one in found.experts) - len(shares)
    best = least(shares, ranks, len(shares) // ranks + 1)
    assert best * (1 - 1e-9) <= found.skew / ranks <= FARTHEST * best


def test_the_search_is_within_two_percent_in_the_mean() -> None:
    ratios = []
    for seed, (ranks, local) in itertools.product(range(12), [(2, 2), (3, 1), (3, 2), (4, 1)]):
        size = ranks * local
        loads = [1 + (seed + 1) * (7 * at * at + seed * at) % 11 for at in range(size)]
        shares = [one / sum(loads) for one in loads]
        (found,) = search_replicas(shares, ranks, most_added=1, price=lambda _, skew: skew)
        ratios.append(found.skew / ranks / least(shares, ranks, local + 1))
    assert max(ratios) <= FARTHEST
    assert sum(ratios) / len(ratios) <= MEAN


@pytest.mark.unmeasured
@pytest.mark.parametrize(("experts", "ranks", "top_k"), [(64, 16, 2), (128, 8, 8), (8, 8, 2)])
def test_many_ranks_become_even(experts: int, ranks: int, top_k: int) -> None:
    loads = ExpertLoads(name="steep", loads=tuple(1 / (at + 1) for at in range(experts)))
    shares = loads.shares(top_k)
    assert shares is not None
    found = search_replicas(shares, ranks, most_added=2, price=lambda _, skew: skew)
    assert found[0].skew <= 1.05
    assert found == search_replicas(shares, ranks, most_added=2, price=lambda _, skew: skew)
    placed = loads.skew_in_order(experts, top_k, ranks, found[0].experts)
    assert placed == pytest.approx(found[0].skew)
    assert len({len(one.experts) for one in found}) == len(found)


def test_what_replicas_cost_leaves_those_out_that_gain_little() -> None:
    shares = (0.4, 0.25, 0.2, 0.15)

    def price(experts: tuple[int, ...], skew: float) -> float:
        return skew + each * (sum(one != EMPTY for one in experts) - len(shares))

    each = 0.0
    many = search_replicas(shares, 2, most_added=1, price=price)[0].num_replicas
    each = 10.0
    assert search_replicas(shares, 2, most_added=1, price=price)[0].num_replicas == 1 <= many
    assert search_replicas((0.7, 0.3), 2, most_added=0, price=price) == ()


def test_replicas_of_an_expert_never_share_a_group() -> None:
    found = group_replicas([4.0, 4.0, 1.0, 1.0, 1.0, 0.5], [0, 0, 1, 2, 3, 4], 2)
    assert found is not None
    assert all({0, 1} & set(group) != {0, 1} for group in found.groups)
    # The last two are left for one group, which has one of them already.
    assert group_replicas([9.0, 3.0, 3.0, 1.0, 1.0, 1.0], [0, 1, 2, 3, 4, 4], 2) is None


def test_hot_experts_have_replicas_where_that_saves_more_than_their_sums_take() -> None:
    once, plan = planned(STEEP, rule="once"), planned(STEEP)
    choice = plan.placement
    assert choice is not None
    assert choice.replicas is not None
    assert choice.has_replicas
    assert plan.predicted.step_seconds < 0.98 * once.predicted.step_seconds
    assert choice.placed_step_seconds == pytest.approx(once.predicted.step_seconds)
    assert choice.replicas.step_seconds == pytest.approx(plan.predicted.step_seconds)
    check_places(plan.experts, 64, 8)
    assert len(plan.experts) == 64 + 8 * choice.replicas.added_places
    assert plan.workload.local_experts == 8 + choice.replicas.added_places
    shares = [one / sum(STEEP) for one in STEEP]
    assert choice.replicas.skew == pytest.approx(fullest(shares, plan.experts, 8) * 8)
    assert plan.workload.skew.mean == pytest.approx(choice.replicas.skew)
    assert f"with {choice.replica_words}" in choice.why
    assert "sums of their gradients" in choice.why


def test_the_sums_are_two_exchanges_and_belong_to_the_step() -> None:
    plan, costs = planned(STEEP), costs_of(PROFILE, allow_modelled=True)
    assert plan.placement is not None
    assert plan.placement.replicas is not None
    each, places = len(plan.experts) // 8, replicas_of(plan.experts)
    sent = [0.0] * 8  # of one exchange, in experts
    for mine in filter(lambda mine: len(mine) > 1, places):
        for place in mine:
            sent[place // each] += (len(mine) - 1) / len(mine)
    expert_bytes = 2 * LAYER.d_model * LAYER.d_hidden * 2
    exchange = costs.collective(
        op="all_to_all", group_size=8, num_bytes=max(sent) * expert_bytes * 8 / 7
    )
    assert plan.placement.replicas.sum_seconds == pytest.approx(2 * exchange.seconds)
    assert plan.predicted.overhead_seconds >= plan.placement.replicas.sum_seconds


def test_memory_has_the_replicas_states_and_what_sums_need() -> None:
    once, plan = planned(STEEP, rule="once"), planned(STEEP)
    expert = 2 * LAYER.d_model * LAYER.d_hidden
    more = plan.memory.state_bytes - once.memory.state_bytes
    assert more == 16 * expert * (plan.workload.local_experts - 8)
    assert plan.workload.local_replicas >= 1
    assert once.workload.local_replicas == 0 == once.workload.summed_experts


def test_what_reads_a_plan_has_the_replicas_times() -> None:
    plan = planned(STEEP)
    assert plan_from_json(canonical_json(plan), "plan") == plan
    step = plan_step(plan=plan, costs=costs_of(PROFILE, allow_modelled=True))
    assert step.seconds == pytest.approx(plan.predicted.step_seconds)
    subject = LayerSubject(plan=plan, profile=PROFILE)
    assert subject.step(None) == pytest.approx(plan.predicted.step_seconds)


def test_few_tokens_are_not_worth_the_sums() -> None:
    few = planned(STEEP, tokens_per_rank=64)
    assert few.placement is not None
    assert few.placement.replicas is not None
    assert not few.placement.has_replicas
    assert "would leave" in few.placement.why
    assert few.predicted == planned(STEEP, tokens_per_rank=64, rule="once").predicted
    assert len(few.experts) in {0, 64}


def test_replicas_that_do_not_fit_are_not_taken() -> None:
    once = planned(STEEP, rule="once", tokens_per_rank=64)
    assert once.memory.peak_bytes is not None
    # Less than the states of one expert more: few tokens give little memory back.
    limit = once.memory.peak_bytes + 2**20
    found = planned(STEEP, memory_limit_bytes=limit, tokens_per_rank=64)
    assert found.placement is not None
    assert not found.placement.has_replicas
    assert found.placement.replicas is None
    assert found.placement.why.endswith("replicas of hot experts do not fit")


def test_even_ranks_have_no_replicas_and_two_experts_cannot() -> None:
    assert _replicas(planned([5] * 64)) is None
    two = LayerShape(d_model=1024, d_hidden=4096, num_experts=8, top_k=1)
    assert _replicas(planned([7, 1, 1, 1, 1, 1, 1, 1], layer=two)) is not None
    assert _replicas(planned([9, 1], layer=_layer(2), world_size=2)) is None
    assert BALANCED.shares(1) is None


def _replicas(plan: Plan) -> Any:
    assert plan.placement is not None
    return plan.placement.replicas


def _layer(num_experts: int) -> LayerShape:
    return LayerShape(d_model=1024, d_hidden=4096, num_experts=num_experts, top_k=1)
