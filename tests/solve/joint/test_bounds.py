"""Bounds of partial layouts, in seconds and in bytes, against all layouts that they may become."""

import itertools
from collections import defaultdict
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from moetune.domain.pipeline import V_SCHEDULES
from moetune.domain.targets import TARGETS
from moetune.domain.training import FoldedLayout, LayoutRequest, TrainingJob
from moetune.huggingface.registry import named_model
from moetune.solve.joint import front
from moetune.solve.joint.best import _Branch, _Branches
from moetune.solve.joint.memory_bounds import _cheapest
from moetune.solve.joint.search import FoldedSearch
from moetune.solve.joint.ties import NOISE
from tests.solve.joint.brute_force import every_layout, fitting
from tests.solve.joint.test_search import OLMOE, search_of

SAME = 1 + 1e-12
LITE = named_model("deepseek-v2-lite").decoder


def _sizes(layout: FoldedLayout) -> tuple[int, ...]:
    return layout.tp, layout.pp, layout.ep, layout.etp


def least_below(search: FoldedSearch, branch: _Branch) -> float:
    """Return the least step of a branch's layouts, which no bound on the way may exceed."""
    if branch.branches is None:
        least = search.priced(branch.layout).step.seconds
    else:
        least = min((least_below(search, one) for one in branch.branches()), default=float("inf"))
    assert branch.seconds <= least * SAME
    return least


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("target", "quantile"),
    [("megatron", 0.02), ("megatron", 0.5), ("torchtitan", 0.1), ("moetune", 0.1)],
)
def test_no_step_is_faster_than_the_bound_of_any_node_above_it(
    target: str, quantile: float
) -> None:
    """Where so many of all layouts fit."""
    decoder = replace(OLMOE, blocks=OLMOE.blocks[:4])
    job = TrainingJob(decoder=decoder, world_size=4, global_batch=8, length=1024)
    search, pins = search_of(job, target=target), LayoutRequest(micro_batch=1)
    layouts = [*every_layout(search, pins)]
    peaks = sorted(search.memory.peak(one).peak_bytes for one in layouts)
    search = replace(search, limit_bytes=peaks[int(quantile * len(peaks))])
    every: dict[tuple[int, ...], float] = defaultdict(lambda: float("inf"))
    for one in fitting(search, layouts):
        every[_sizes(one.layout)] = min(every[_sizes(one.layout)], one.step.seconds)
    found = {}
    for root in _Branches.of(search, pins).roots():
        found[_sizes(root.layout)] = least_below(search, root)
        assert root.seconds <= every[_sizes(root.layout)] * SAME
    for sizes, fastest in every.items():
        assert found[sizes] == pytest.approx(fastest), "a branch left out the fastest of its sizes"


def least_of_both(search: FoldedSearch, branch: front._Branch) -> tuple[float, float]:
    """Return the least step and the fewest bytes of a branch, which no bound may exceed."""
    if branch.branches is None:
        priced = search.priced(branch.layout)
        seconds, num_bytes = priced.step.seconds, priced.memory.peak_bytes
    else:
        every = [least_of_both(search, one) for one in branch.branches(inf)]
        seconds = min((one for one, _ in every), default=inf)
        num_bytes = min((one for _, one in every), default=inf)
    assert branch.seconds <= seconds * SAME
    assert branch.peak_bytes <= num_bytes * SAME
    return seconds, num_bytes


@pytest.mark.unmeasured
@pytest.mark.parametrize("target", ["megatron", "torchtitan", "moetune"])
def test_no_layout_of_the_front_is_faster_or_smaller_than_a_node_above_it(target: str) -> None:
    decoder = replace(LITE, blocks=LITE.blocks[:4])
    job = TrainingJob(decoder=decoder, world_size=4, global_batch=8, length=1024)
    search, pins = search_of(job, target=target), LayoutRequest(micro_batch=1)
    layouts = [*map(search.priced, every_layout(search, pins))]
    sweep = front._Sweep(search=search, pins=pins, table=search.dispatchers(pins), most_bytes=inf)
    found = [least_of_both(search, one) for one in sweep.roots()]
    assert min(one for one, _ in found) == pytest.approx(min(one.step.seconds for one in layouts))
    smallest = min(one.memory.peak_bytes for one in layouts)
    assert min(one for _, one in found) == pytest.approx(smallest)


@pytest.mark.parametrize("target", [*TARGETS])
def test_what_no_search_looks_at_breaks_a_rule(target: str) -> None:
    """Pipelines, and lists of modules, that their overlap does not go with."""
    job = TrainingJob(decoder=OLMOE, world_size=4, global_batch=16, length=1024)
    search, pins = search_of(job, target=target), LayoutRequest(micro_batch=1)
    space, table = search.space, search.dispatchers(pins)
    for sizes, overlap in itertools.product(space.sizes(pins), space.target.overlaps):
        every = space.pipelines(replace(sizes, overlap="none"), pins)
        overlapped = replace(sizes, overlap=overlap)
        kept = {*space.pipelines(overlapped, pins)}
        for one, modules in itertools.product(every, space.recomputes(pins)):
            layout = replace(one, overlap=overlap)
            is_left_out = bool(modules) and space.keeps_all(layout)
            if is_left_out or layout not in kept or not table.ranked(layout, modules):
                assert not space.is_allowed(replace(layout, recompute=modules))


@pytest.mark.parametrize("target", [*TARGETS])
def test_other_stages_and_shards_break_a_rule(target: str) -> None:
    """V schedules with another number of stages, and ZeRO stages of the target's own."""
    job = TrainingJob(decoder=OLMOE, world_size=4, global_batch=16, length=1024)
    space, pins = search_of(job, target=target).space, LayoutRequest(micro_batch=1)
    for sizes in space.sizes(pins):
        kept = [*space.pipelines(sizes, pins)]
        for one in kept:
            for schedule in {*space.target.schedules} & V_SCHEDULES:
                other = replace(one, schedule=schedule)
                assert other in kept or not space.is_allowed(other)
            for zero in {*space.target.zero} - {0, *space.zeros(pins, one.pp, one.tp)}:
                assert not space.is_allowed(replace(one, zero=zero))


@pytest.mark.parametrize("target", ["megatron", "torchtitan", "moetune"])
def test_layouts_take_no_less_than_what_is_known_before_they_are_priced(target: str) -> None:
    """Micro-batches before their chunks are priced, and gradients before the passes."""
    job = TrainingJob(decoder=LITE, world_size=16, global_batch=32, length=1024)
    search, pins = search_of(job, target=target), LayoutRequest()
    space, table = search.space, search.dispatchers(pins)
    for sizes, modules in itertools.product(space.sizes(pins), space.recomputes(pins)):
        for one in space.overlapped(sizes, pins):
            assert table.at_least(one) <= table.seconds(one, modules) * SAME
            pipeline = search.prices.pipeline(one)
            for zero in space.zeros(pins, one.pp, one.tp):
                sharded = replace(one, zero=zero)
                gradients = search.prices.gradients(sharded, pipeline)
                assert search.prices.update.least_of_gradients(sharded) <= gradients


def test_chunks_keep_what_whole_exchanges_do() -> None:
    """So that the front cuts both at once."""
    job = TrainingJob(decoder=LITE, world_size=16, global_batch=32, length=1024)
    search, pins = search_of(job, target="moetune"), LayoutRequest()
    for sizes in search.space.sizes(pins):
        peaks = {search.memory.peak(one).peak_bytes for one in search.space.overlapped(sizes, pins)}
        assert len(peaks) == 1


def test_no_overlap_alone_has_a_better_front_than_all() -> None:
    job = TrainingJob(decoder=LITE, world_size=16, global_batch=32, length=1024)
    search, pins = search_of(job, target="moetune"), LayoutRequest(pp=2, micro_batch=1)
    every = front.memory_front(search, pins)
    for overlap in search.target.overlaps:
        for one in front.memory_front(search, replace(pins, overlap=overlap)):
            peak = one.memory.peak_bytes * SAME
            least = min(other.step.seconds for other in every if other.memory.peak_bytes <= peak)
            assert least <= one.step.seconds * (1 + NOISE)


@pytest.mark.parametrize("target", [*TARGETS])
def test_a_micro_batch_takes_least_with_the_fastest_of_the_lists(target: str) -> None:
    job = TrainingJob(decoder=LITE, world_size=8, global_batch=16, length=1024)
    search, pins = search_of(job, target=target), LayoutRequest()
    space, table = search.space, search.dispatchers(pins)
    for sizes in space.sizes(pins):
        for one in space.overlapped(sizes, pins):
            for lists in (space.recomputes(pins), space.recomputes(pins)[-1:]):
                least = min(table.seconds(one, modules) for modules in lists)
                assert table.least_seconds(one, lists) == least


@pytest.mark.parametrize("num_kinds", [1, 2, 3, 5])
def test_the_cheapest_blocks_are_those_that_take_least(num_kinds: int) -> None:
    rng = np.random.default_rng(num_kinds)
    counts = rng.integers(1, 9, num_kinds).astype(float)
    sizes = rng.uniform(0.0, 1.0, (2, 3, 2, 4, num_kinds))
    for num in range(1, int(counts.sum()) + 1):
        found = _cheapest(np.array([[[num]], [[num - 1.0]]]), counts, sizes)
        for at in np.ndindex(found.shape):
            blocks = np.sort(np.repeat(sizes[at], counts.astype(int)))
            assert found[at] == pytest.approx(blocks[: num - at[2]].sum())


@pytest.mark.unmeasured
@pytest.mark.parametrize("may_offload", [False, True])
@pytest.mark.parametrize("target", ["megatron", "torchtitan", "deepspeed"])
def test_no_layout_needs_less_memory_than_its_bound(target: str, *, may_offload: bool) -> None:
    decoder = replace(LITE, blocks=LITE.blocks[:10], family="mixtral")  # DeepSpeed cuts its heads
    job = TrainingJob(decoder=decoder, world_size=8, global_batch=16, length=2048)
    search, pins = search_of(job, target=target, gib=float("inf")), LayoutRequest(micro_batch=1)
    space, table = search.space, search.dispatchers(pins)
    ratios: list[float] = []
    loose: list[float] = []
    for sizes in space.sizes(pins):
        overlapped = [*space.overlapped(sizes, pins)]
        for one, bounds in search.pipelines(overlapped, pins, may_offload=may_offload):
            for recompute, bound in bounds.items():
                for cut in search.cuts(one, recompute, pins, table):
                    least = search.memory.needs(cut)[0]
                    if may_offload:
                        wait = replace(cut, offload_activations=0.9)
                        able = [to for to in (cut, wait) if space.is_allowed(to)]
                        shares = (0.0, 1.0) if space.target.offloads_optimizer else (0.0,)
                        least = min(
                            search.memory.needs(to, on_host=share)[0]
                            for to, share in itertools.product(able, shares)
                            if share == 0 or to.zero == 1
                        )
                    assert bound <= least * SAME
                    # Overlap with sharded gradients has one bound for all of its ZeRO stages.
                    (loose if cut.overlap == "batch" and cut.zero > 1 else ratios).append(
                        bound / least
                    )
    assert max(ratios) > 0.95
    assert sum(ratios) / len(ratios) > 0.7
    assert not loose or sum(loose) / len(loose) > 0.55
