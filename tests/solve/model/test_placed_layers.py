"""Experts of a model's layers by their own loads: against every partition, and every layout."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from moetune.domain.routing import ExpertLoads
from moetune.domain.routing_record import RecordedLayer, RecordedLayers
from moetune.domain.targets import find_target
from moetune.domain.training import FoldedLayout, LayoutRequest, TrainingJob
from moetune.report.reasons import placement_reason
from moetune.solve.model.alternatives import memory_front
from moetune.solve.model.best import BestLayouts
from moetune.solve.model.placement import PlacedLayers, placing, solve_placed
from moetune.solve.model.search import NOISE, LayoutTable
from tests.solve.model.brute_force import OLMOE, every_layout, search_of

EXPERTS, TOP_K = 64, 8
SMALL = replace(OLMOE, blocks=OLMOE.blocks[:4])
SAME = 1e-9


def recorded(*loads: tuple[float, ...], top_k: float = 1.0, spread: float = 1.0) -> RecordedLayers:
    return RecordedLayers(
        name="f",
        layers=tuple(
            RecordedLayer(loads=ExpertLoads(name="f", loads=row), spread=spread, top_k=top_k)
            for row in loads
        ),
    )


def uneven(seed: int, spread: float = 1.0) -> tuple[float, ...]:
    drawn = random.Random(seed)
    return tuple(drawn.lognormvariate(0.0, spread) for _ in range(EXPERTS))


LOADS = tuple(uneven(seed, 0.4 + 0.4 * seed) for seed in range(4))


def test_what_no_placement_betters_keeps_its_order() -> None:
    layers = PlacedLayers.of(recorded((1.0,) * 4, (1.0, 4.0, 2.0, 3.0), (4.0, 1.0, 2.0, 3.0)))
    assert [placement.experts for placement in layers.placements(2)] == [(), (), ()]
    assert [placement.experts for placement in layers.placements(4)] == [(), (), ()]
    assert [placement.experts for placement in layers.placements(1)] == [(), (), ()]
    odd = PlacedLayers.of(recorded((3.0, 3.0, 2.0, 3.0, 2.0, 2.0)))  # 8 of 15 rows at least
    assert [placement.experts for placement in odd.placements(2)] == [()]


def job_of(layers: RecordedLayers, *, ranks: int = 4, batch: int = 8) -> TrainingJob:
    return TrainingJob(
        decoder=layers.with_numbers(SMALL), world_size=ranks, global_batch=batch, length=4096,
        routing=layers,
    )  # fmt: skip


def test_memory_is_that_of_the_steps_that_are_fullest() -> None:
    layout = FoldedLayout(dp=4, ep=4, micro_batch=2)
    rare, even = (
        search_of(job_of(recorded(*LOADS, top_k=TOP_K, spread=spread)), target="moetune")
        for spread in (1.3, 1.0)
    )
    assert rare.price(layout).step == even.price(layout).step
    more, less = (search.price(layout).memory for search in (rare, even))
    assert more.activations["experts"] > less.activations["experts"]


@pytest.mark.parametrize(
    ("kind", "pins", "quantile"),
    [
        (RecordedLayers, LayoutRequest(tp=1, micro_batch=1), 1.0),
        (PlacedLayers, LayoutRequest(tp=1, micro_batch=1), 1.0),
        (RecordedLayers, LayoutRequest(tp=1, micro_batch=2, overlap="none"), 0.3),
        (PlacedLayers, LayoutRequest(tp=1, ep=4, micro_batch=2), 0.1),
    ],
)
def test_no_layout_is_faster_with_each_layers_routing(
    kind: type[RecordedLayers], pins: LayoutRequest, quantile: float
) -> None:
    plain = recorded(*LOADS, top_k=TOP_K)
    job = job_of(plain if kind is RecordedLayers else PlacedLayers.of(plain))
    open_search = search_of(job, target="moetune")
    every = [*every_layout(open_search, pins)]
    peaks = sorted(open_search.price(layout).memory.peak_bytes for layout in every)
    search = search_of(job, gib=peaks[int(quantile * (len(peaks) - 1))] / 2**30, target="moetune")
    ranked = BestLayouts(search, pins).ranked()
    every = [layout for layout in every if search.fits(layout)]
    assert every
    best = min(search.price(layout).step.seconds for layout in every)
    assert search.fits(ranked[0].layout)
    assert best * (1 - SAME) <= ranked[0].step.seconds <= best * (1 + NOISE)
    assert ranked[0].step == search.price(ranked[0].layout).step


def test_a_layout_that_fits_on_the_mean_alone_is_left_out() -> None:
    """Of two stages the second one has the layers with a full rank."""
    even = (1.0,) * EXPERTS
    steep = (8.0,) * 4 + (1.0,) * (EXPERTS - 4)
    pins = LayoutRequest(tp=1, pp=2, vpp=1, ep=2, micro_batch=4, overlap="none", recompute=())
    search = search_of(job_of(recorded(even, even, steep, steep, top_k=TOP_K)), target="moetune")
    roomy = BestLayouts(search, pins).ranked()[0]
    mean, fullest = (
        search.fitting.memory.needs(roomy.layout)[0],
        search.memory_of_wholes.needs(roomy.layout)[0],
    )
    assert mean < fullest
    tight = search_of(search.wholes.job, gib=(mean + fullest) / 2 / 2**30, target="moetune")
    assert tight.fitting.memory.needs(roomy.layout)[0] < tight.limit_bytes
    assert not tight.fits(roomy.layout)
    for row in BestLayouts(tight, pins).ranked():
        assert (
            tight.fits(row.layout) or row.layout == LayoutTable(search=tight, pins=pins).smallest()
        )


def test_the_front_is_in_the_order_of_its_memory() -> None:
    search = search_of(job_of(recorded(*LOADS, top_k=TOP_K)), target="moetune")
    front = memory_front(search, LayoutRequest(tp=1))
    assert len(front) > 1
    peaks = [row.memory.peak_bytes for row in front]
    steps = [row.step.seconds for row in front]
    assert peaks == sorted(peaks)
    assert all(after <= before * (1 - NOISE) for before, after in pairwise(steps))
    assert all(row.step == search.price(row.layout).step for row in front if not row.saved_seconds)


def test_layouts_that_place_have_no_shards_of_experts() -> None:
    target = placing(find_target("moetune"))
    assert (target.zero, target.zero_with_pp) == ((0, 1), 1)
    search = search_of(job_of(recorded(*LOADS, top_k=TOP_K)), target="moetune")
    for zero in (0, 1):
        placed = solve_placed(search, LayoutRequest(tp=1, pp=1, zero=zero))
        assert placed.placement.placed_step_seconds is not None
    placed = solve_placed(search, LayoutRequest(tp=1, pp=1, zero=3))
    assert placed.untried == "zero"
    assert "with ZeRO stage 3" in placement_reason(placed, target="moetune", zero=3)


@pytest.mark.parametrize(
    ("spread", "is_taken"), [(1.5, True), (0.01, False)], ids=["uneven", "even"]
)
def test_a_placement_is_taken_where_the_step_gains_more_than_two_percent(
    spread: float, *, is_taken: bool
) -> None:
    loads = recorded(*(uneven(seed, spread) for seed in range(4)), top_k=TOP_K)
    pins = LayoutRequest(tp=1, pp=1, ep=4, zero=1)
    natural = BestLayouts(search_of(job_of(loads), target="moetune"), pins).ranked()[0].step.seconds
    placed = (
        BestLayouts(search_of(job_of(PlacedLayers.of(loads)), target="moetune"), pins)
        .ranked()[0]
        .step.seconds
    )
    layouts, choice, untried = solve_placed(search_of(job_of(loads), target="moetune"), pins)
    assert untried == ""
    assert choice.gain == pytest.approx(1 - placed / natural, rel=1e-9)
    assert choice.is_taken is is_taken is ((choice.gain or 0.0) > 0.02)
    assert layouts.best().step.seconds == pytest.approx(placed if is_taken else natural)
    kept = solve_placed(
        search_of(job_of(loads), target="moetune"), replace(pins, expert_placement="natural")
    )
    assert not kept.placement.is_taken
    words = placement_reason(kept, target="moetune", zero=None)
    assert words.startswith("as pinned; the fullest ranks have ")


def test_a_placement_is_taken_where_nothing_else_fits() -> None:
    loads = recorded(*(uneven(seed, 1.5) for seed in range(4)), top_k=TOP_K)
    pins = LayoutRequest(tp=1, pp=1, ep=4, zero=1, micro_batch=2, recompute=(), overlap="none")
    peaks = [
        BestLayouts(search_of(job_of(layers), target="moetune"), pins).ranked()[0].memory.peak_bytes
        for layers in (loads, PlacedLayers.of(loads))
    ]
    assert peaks[1] < peaks[0]
    placed = solve_placed(search_of(job_of(loads), gib=sum(peaks) / 2**31, target="moetune"), pins)
    assert placed.placement.is_taken
    assert "they do not fit" in placement_reason(placed, target="moetune", zero=1)
    layouts = placed.layouts
    assert layouts.search.fits(layouts.best().layout)
