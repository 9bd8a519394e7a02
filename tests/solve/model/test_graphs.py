"""CUDA graphs of free searches: taken where recipes have them, they save enough and leave room."""

from dataclasses import replace

import pytest

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.domain.site import site_of
from moetune.domain.target_rules import target_rules
from moetune.domain.targets import find_target
from moetune.domain.training import CudaGraphs, LayoutRequest, TrainingDtype, TrainingJob
from moetune.solve.model.alternatives import (
    ROOM_FOR_GRAPHS,
    WORTH_GRAPHS,
    as_graphed,
    memory_front,
    with_graphs,
)
from moetune.solve.model.best import BestLayouts
from moetune.solve.model.search import NOISE, FoldedSearch, PricedLayout
from tests.solve.model.brute_force import OLMOE
from tests.solve.model.brute_force import search_of as search_in

SMALL = replace(OLMOE, blocks=OLMOE.blocks[:8])
NO_PINS = LayoutRequest()
ALL_GRAPHS: tuple[CudaGraphs, ...] = ("none", "partial", "full")


def search_of(
    profile: str = "h100-x8", *, dtype: TrainingDtype = "bfloat16", target: str = "megatron",
    gib: float = 70.0, length: int = 1024,
) -> FoldedSearch:  # fmt: skip
    machine = load_profile_file(bundled_profiles()[profile])
    job = TrainingJob(decoder=SMALL, world_size=8, global_batch=64, length=length, dtype=dtype)
    return search_in(job, machine, target=target, gib=gib, site=site_of(machine))


def best_of(search: FoldedSearch, pins: LayoutRequest) -> PricedLayout:
    return BestLayouts(search, pins).best()


@pytest.mark.parametrize(
    ("profile", "dtype", "tried"),
    [
        ("h100-x8", "bfloat16", ("partial",)), ("h100-x8", "fp8", ("partial",)),
        ("gb200-nvl72", "bfloat16", ("partial",)), ("gb200-nvl72", "mxfp8", ("partial", "full")),
        ("a100-x8", "bfloat16", ()), ("mi300x-x8", "bfloat16", ()),
    ],
)  # fmt: skip
def test_graphs_are_those_of_recipes(
    profile: str, dtype: TrainingDtype, tried: tuple[CudaGraphs, ...]
) -> None:
    site = site_of(load_profile_file(bundled_profiles()[profile]))
    for target in ("megatron", "bridge", "bridge@0.5"):
        assert tuple(find_target(target).tried_graphs(site, dtype)) == tried
    for target in ("megatron@0.17", "bridge@0.4", "torchtitan", "moetune"):
        assert not [*find_target(target).tried_graphs(site, dtype)]


@pytest.mark.parametrize(
    ("profile", "dtype"),
    [("h100-x8", "bfloat16"), ("gb200-nvl72", "bfloat16"), ("gb200-nvl72", "mxfp8")],
)
@pytest.mark.parametrize("length", [1024, 8192])
def test_graphs_are_taken_where_they_save_more_than_prices_err(
    profile: str, dtype: TrainingDtype, length: int
) -> None:
    search = search_of(profile, dtype=dtype, length=length)
    plain = best_of(search, NO_PINS)
    graphed = with_graphs(search, NO_PINS, plain)
    tried = [*search.target.tried_graphs(search.site, dtype)] if search.site else []
    roomy = replace(search, limit_bytes=search.limit_bytes * (1 - ROOM_FOR_GRAPHS))
    steps = [best_of(roomy, replace(NO_PINS, cuda_graphs=graphs)).step.seconds for graphs in tried]
    assert (graphed is not None) == (min(steps) < plain.step.seconds * (1 - WORTH_GRAPHS))
    if graphed is not None:
        best = graphed.best()
        assert best.layout.cuda_graphs in tried
        assert best.step.seconds <= min(steps) * (1 + WORTH_GRAPHS) * (1 + NOISE)
        assert best.saved_by_graphs_seconds > 0
        rules = target_rules(best.layout, search.target, search.job, search.site)
        assert next(rules, None) is None


def test_graphs_leave_room_for_their_pools() -> None:
    roomy = search_of("gb200-nvl72")
    graphed = with_graphs(roomy, NO_PINS, best_of(roomy, NO_PINS))
    assert graphed is not None
    needed = graphed.best().memory.peak_bytes
    tight = search_of("gb200-nvl72", gib=needed * (1 + ROOM_FOR_GRAPHS / 2) / 2**30)
    solved = with_graphs(tight, NO_PINS, best_of(tight, NO_PINS))
    assert solved is not None
    assert solved.best().memory.peak_bytes <= tight.limit_bytes * (1 - ROOM_FOR_GRAPHS) < needed


def test_no_graphs_are_tried_where_they_are_pinned_or_nothing_fits() -> None:
    search = search_of()
    plain = best_of(search, NO_PINS)
    for graphs in ALL_GRAPHS:
        pins = replace(NO_PINS, cuda_graphs=graphs)
        assert with_graphs(search, pins, plain) is None
        assert as_graphed(pins, plain.layout) is pins
    assert as_graphed(NO_PINS, plain.layout).cuda_graphs == "none"
    assert with_graphs(replace(search, site=None), NO_PINS, plain) is None
    small = search_of(gib=1.0)
    assert with_graphs(small, NO_PINS, best_of(small, NO_PINS)) is None


@pytest.mark.thorough
def test_a_front_has_layouts_with_graphs_and_without() -> None:
    search = search_of()
    graphed = best_of(search, replace(NO_PINS, cuda_graphs="partial"))
    plain, both = memory_front(search, NO_PINS), memory_front(search, NO_PINS, "partial")
    assert {priced.layout.cuda_graphs for priced in plain} == {"none"}
    assert both[-1].step.seconds <= graphed.step.seconds * (1 + NOISE)
    for priced in (*plain, graphed):
        within = [point for point in both if point.memory.peak_bytes <= priced.memory.peak_bytes]
        least = min(point.step.seconds for point in within)
        assert least <= priced.step.seconds / (1 - NOISE)
    pinned = replace(NO_PINS, cuda_graphs="none")
    assert memory_front(search, pinned, "partial") == memory_front(search, pinned)
