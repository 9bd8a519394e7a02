"""Replicas of hot experts in a model's layers: against every assignment, and every layout."""

from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.errors import InputError
from moetune.domain.model_placement import LayerPlacement
from moetune.domain.placement import EMPTY, busiest_sum, check_places, replicas_of
from moetune.domain.recorded_layers import RecordedLayers
from moetune.domain.training import Degrees, FoldedLayout, LayoutRequest
from moetune.solve.joint import replicated_layers
from moetune.solve.joint.best import BestLayouts, best_layouts
from moetune.solve.joint.placed_layers import PlacedLayers
from moetune.solve.joint.placement import choice_of, with_replicas
from moetune.solve.joint.replicated_layers import ReplicatedLayers
from moetune.solve.joint.ties import NOISE
from moetune.solve.layer.replica_search import EVEN
from moetune.solve.training.parameters import RankParameters, no_places
from tests.solve.joint.brute_force import every_layout
from tests.solve.joint.test_placed_layers import (
    EXPERTS,
    LOADS,
    SAME,
    TOP_K,
    apart_search,
    job_of,
    recorded,
    uneven,
)

STEEP = tuple(uneven(10 + seed, 1.6) for seed in range(4))


def replicated(plain: RecordedLayers) -> ReplicatedLayers:
    return ReplicatedLayers.of_placed(PlacedLayers.of(plain))


def fullest_of(experts: tuple[int, ...], shares: list[float], ranks: int) -> float:
    numbers = [len(places) for places in replicas_of(experts)]
    each = len(experts) // ranks
    sums = [
        sum(shares[one] / numbers[one] for one in experts[at : at + each] if one != EMPTY)
        for at in range(0, len(experts), each)
    ]
    return max(sums) * ranks


@st.composite
def steep_layers(draw: st.DrawFn) -> tuple[list[float], int]:
    ranks = draw(st.sampled_from([2, 4, 8]))
    size = ranks * draw(st.integers(1, 32 // ranks))
    load = st.sampled_from([1.0, 1.0, 1.0, 2.0, 5.0, 20.0])
    return draw(st.lists(load, min_size=size, max_size=size)), ranks


@given(case=steep_layers())
@settings(deadline=None, max_examples=150)
def test_every_rank_has_as_many_places_and_the_fullest_one_fewer_rows(
    case: tuple[list[float], int],
) -> None:
    loads, ranks = case
    plain = recorded(tuple(loads))
    once, layers = PlacedLayers.of(plain), replicated(plain)
    before, found = once.placement(0, ranks), layers.placement(0, ranks)
    shares = [load / sum(loads) for load in loads]
    assert found.natural_skew == before.natural_skew
    assert found.placed_skew <= before.placed_skew
    assert (
        layers.skew(0, ranks).mean == found.placed_skew >= layers.fullest_at_least(0, ranks) - SAME
    )
    if not found.has_replicas:
        assert found == before
        assert layers.added_places(0, ranks) == layers.summed_experts(0, ranks) == 0
        return
    check_places(found.experts, len(loads), ranks)
    assert before.placed_skew > EVEN
    assert fullest_of(found.experts, shares, ranks) == pytest.approx(found.placed_skew)
    assert 1 <= layers.added_places(0, ranks) <= 4
    assert len(found.experts) == len(loads) + ranks * layers.added_places(0, ranks)
    assert layers.summed_experts(0, ranks) == busiest_sum(found.experts, ranks) > 0


@pytest.mark.parametrize("seed", range(12))
def test_few_experts_are_nearly_as_even_as_any_assignment_of_as_many_places(seed: int) -> None:
    loads, ranks = uneven(seed, 1.2)[:4], 2
    found = replicated(recorded(loads)).placement(0, ranks)
    shares, each = [load / sum(loads) for load in loads], len(found.experts or loads) // ranks
    sets = [one for size in range(1, each + 1) for one in combinations(range(4), size)]
    least = min(
        fullest_of(
            tuple(e for one in pair for e in (*one, *[EMPTY] * (each - len(one)))), shares, 2
        )
        for pair in product(sets, repeat=ranks)
        if {*pair[0], *pair[1]} == {0, 1, 2, 3}
    )
    assert least - SAME <= found.skew <= max(1.15 * least, EVEN)


def test_even_layers_and_one_rank_have_no_replicas() -> None:
    layers = replicated(recorded((1.0,) * 8, STEEP[0][:8]))
    assert not layers.placement(0, 4).has_replicas
    assert layers.placement(1, 4).has_replicas
    assert layers.placements(1) == PlacedLayers.of(layers).placements(1)
    assert layers.added_places(None, 4) == layers.summed_experts(None, 4) == 0


def test_a_device_has_the_parameters_of_all_of_its_places() -> None:
    layout, layers = FoldedLayout(dp=32, ep=32), replicated(recorded(*STEEP, top_k=TOP_K))
    job = job_of(layers, ranks=32, batch=64)
    prices, memory = apart_search(job).of_wholes
    [rank] = prices.stages.ranks(layout)
    (dense, experts), (same, once) = (
        RankParameters(decoder=job.decoder, added=added).of(layout, rank)
        for added in (job.added_places, no_places)
    )
    each = job.decoder.layer.d_model * job.decoder.layer.d_hidden * 3
    added = sum(layers.added_places(one, 32) for one in range(4))
    assert added > 0
    assert dense == same
    assert experts - once == pytest.approx(added * each)
    other = apart_search(replace(job, routing=layers.once)).of_wholes[1]
    more, less = (one.peak(layout).parts["parameters"] for one in (memory, other))
    assert more - less == pytest.approx(2 * added * each)


def test_sums_and_copies_of_replicas_are_two_exchanges_of_each_layer() -> None:
    layout, layers = FoldedLayout(dp=32, ep=32), replicated(recorded(*STEEP, top_k=TOP_K))
    job = job_of(layers, ranks=32, batch=64)
    step = apart_search(job).priced(layout).step
    prices = apart_search(job).of_wholes[0]
    each = job.decoder.layer.d_model * job.decoder.layer.d_hidden * 3 * 2
    seconds = sum(
        2 * prices.device.collective(
            "all_to_all", prices.device.span(32, 1),
            layers.summed_experts(one, 32) / 2 * each * 32 / 31,
        )
        for one in range(4)
    )  # fmt: skip
    assert step.parts["replicas"] == pytest.approx(seconds)
    assert sum(step.parts.values()) == pytest.approx(step.seconds)
    once = apart_search(replace(job, routing=layers.once)).priced(layout).step
    assert "replicas" not in once.parts
    assert step.seconds < 0.9 * once.seconds


@pytest.mark.parametrize("pins", [LayoutRequest(tp=1, micro_batch=1), LayoutRequest(tp=1, ep=16)])
def test_no_layout_with_replicas_is_faster(pins: LayoutRequest) -> None:
    job = job_of(replicated(recorded(*STEEP, top_k=TOP_K)), ranks=16, batch=16)
    search = apart_search(job)
    found = best_layouts(search, pins)
    every = [one for one in every_layout(search, pins) if search.fits(one)]
    best = min(search.priced(one).step.seconds for one in every)
    assert best * (1 - SAME) <= found[0].step.seconds <= best * (1 + NOISE)
    limit = found[0].step.seconds
    assert BestLayouts(apart_search(job), pins).best_below(0.98 * best) is None
    below = BestLayouts(apart_search(job), pins)
    assert below.best_below(limit * 1.001) == found[0]
    assert below.ranked() == found


def test_nothing_is_below_what_no_layout_reaches() -> None:
    job = job_of(replicated(recorded(*STEEP, top_k=TOP_K)), ranks=16, batch=16)
    layouts = BestLayouts(apart_search(job), LayoutRequest(tp=1, ep=16, micro_batch=1))
    assert layouts.best_below(1e-9) is None
    assert layouts.best().step.seconds > 1e-9


def test_replicas_that_cannot_be_kept_apart_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicated_layers, "group_replicas", lambda *_, **__: None)
    layers = replicated(recorded(*STEEP, top_k=TOP_K))
    assert layers.placements(32) == layers.once.placements(32)


def test_a_choice_of_replicas_says_what_they_save() -> None:
    layers = replicated(recorded(*STEEP, top_k=TOP_K))
    choice = choice_of(
        layers.once.placements(16), natural_step_seconds=2.0, placed_step_seconds=1.5
    )
    found = with_replicas(
        layers.placements(16), choice, ep=16, once_step_seconds=1.5, step_seconds=1.2,
        sum_seconds=0.01,
    )  # fmt: skip
    assert found.has_replicas
    assert found.replicas is not None
    assert found.replicas.num_replicas == sum(one.num_replicas for one in layers.placements(16))
    assert found.replicas.added_places == max(layers.added_places(one, 16) for one in range(4))
    assert (found.natural_step_seconds, found.placed_step_seconds) == (2.0, 1.5)
    assert "saving 20.0 % of the step" in found.why


def test_a_layer_with_replicas_has_every_expert() -> None:
    skews = {"natural_skew": 2.0, "placed_skew": 1.0, "least_skew": 1.0}
    assert LayerPlacement(experts=(0, 1, 0, EMPTY), **skews).num_replicas == 1
    for wrong in ((0, 2, 0, EMPTY), (0, 1, 1, -2)):
        with pytest.raises(InputError, match="every expert"):
            LayerPlacement(experts=wrong, **skews)


def test_layers_with_other_numbers_of_places_are_priced_apart() -> None:
    """Each as in a model of its own."""
    some, both = (LOADS[0], STEEP[0], STEEP[1], (1.0,) * EXPERTS), Degrees(forward=2, backward=3)
    layout = FoldedLayout(dp=32, ep=32, overlap="chunks", degree=both)

    def seconds_of(*loads: tuple[float, ...]) -> list[float]:
        layers = replicated(recorded(*loads, top_k=TOP_K))
        prices = apart_search(job_of(layers, ranks=32, batch=64)).of_wholes[0]
        return [one.both for one in prices.blocks.seconds(layout)]

    layers = replicated(recorded(*some, top_k=TOP_K))
    assert len({layers.added_places(one, 32) for one in range(4)}) > 1
    alone = [seconds_of(*(one,) * 4) for one in some]
    assert seconds_of(*some) == pytest.approx([one for [one] in alone])
