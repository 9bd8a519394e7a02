"""Bounds of the table's rows, in seconds and in bytes, against all layouts of theirs."""

import itertools
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from moetune.domain.architecture import Decoder
from moetune.domain.rules import broken_rules
from moetune.domain.target_rules import target_rules
from moetune.domain.targets import TARGETS
from moetune.domain.training import (
    FoldedLayout,
    LayoutRequest,
    TrainingDtype,
    TrainingJob,
    ZeroStage,
)
from moetune.huggingface.registry import named_model
from moetune.solve.model.search import Group, LayoutTable
from moetune.solve.model.space import cheapest
from tests.solve.model.brute_force import OLMOE, every_layout, search_of

SAME = 1 + 1e-12
ZERO_STAGES: tuple[ZeroStage, ...] = get_args(ZeroStage)
LITE = named_model("deepseek-v2-lite").decoder
LLAMA = named_model("llama-3-8b").decoder


def _sizes(layout: FoldedLayout) -> tuple[int, ...]:
    return layout.tp, layout.pp, layout.ep, layout.etp


def _group(group: Group) -> tuple[int, ...]:
    return *_sizes(group[0]), group[0].cp, group[0].micro_batch


def _row(layout: FoldedLayout) -> tuple[object, ...]:
    return *_sizes(layout), layout.vpp, layout.schedule, layout.overlap, layout.recompute


@pytest.mark.unmeasured
@pytest.mark.parametrize("target", ["megatron", "torchtitan", "moetune"])
def test_no_layout_is_faster_or_smaller_than_its_row(target: str) -> None:
    """And each layout that the rules allow has a row."""
    decoder = replace(LITE, blocks=LITE.blocks[:4])
    job = TrainingJob(decoder=decoder, world_size=4, global_batch=8, length=1024)
    search, pins = search_of(job, target=target), LayoutRequest(micro_batch=1)
    table = LayoutTable(search=search, pins=pins)
    groups = {_sizes(bound.group[0]): bound.seconds for bound in table.bounds}
    rows = {_row(entry.layout): entry for group in table.groups for entry in table.rows(group)}
    sizes = {_sizes(g[0]): search.fitting.least_of_states(g[0], pins) for g in table.groups}
    for layout in every_layout(search, pins):
        row = rows[_row(layout)]
        seconds, peak = search.prices.least(layout), search.fitting.memory.needs(layout)[0]
        ranked = {way.dispatcher: way.seconds for way in table.dispatchers(row.layout)}
        assert layout.ep == 1 or layout.dispatcher in ranked
        micro_batch = ranked.get(layout.dispatcher, min(ranked.values()))
        rounds = search.prices.rounds_at_least(layout)
        assert groups[_sizes(layout)] <= micro_batch * rounds * SAME
        assert micro_batch * rounds <= seconds * SAME
        assert max(sizes[_sizes(layout)], row.peak_bytes) <= peak * SAME


@pytest.mark.parametrize("target", ["megatron", "bridge"])
def test_a_row_that_needs_the_host_takes_no_longer_than_its_layouts(target: str) -> None:
    job = TrainingJob(decoder=LITE, world_size=8, global_batch=16, length=4096)
    search, pins = search_of(job, target=target, gib=40), LayoutRequest(micro_batch=1)
    table, limit, num = LayoutTable(search=search, pins=pins), search.limit_bytes, 0
    for row in itertools.chain.from_iterable(map(table.rows, table.groups)):
        if row.peak_bytes > limit:
            continue
        bound, alone = (table.optimizer_at_least(row, most) for most in (limit, float("inf")))
        for cut in itertools.chain.from_iterable(map(table.zero_stages, table.cuts(row.layout))):
            for whole in search.fitting.fitting_layouts(cut, pins):
                num += bound > alone
                seconds = search.prices.optimizer_seconds(whole, whole.offload_optimizer)
                assert bound <= seconds * SAME
    assert num > 50


@pytest.mark.parametrize("target", [*TARGETS])
def test_what_no_search_looks_at_breaks_a_rule(target: str) -> None:
    """Pipelines, and lists of modules, that their overlap does not go with."""
    job = TrainingJob(decoder=OLMOE, world_size=4, global_batch=16, length=1024)
    search, pins = search_of(job, target=target), LayoutRequest(micro_batch=1)
    space, table = search.space, LayoutTable(search=search, pins=pins)
    for sizes, overlap in itertools.product(space.sizes(pins), space.target.overlaps):
        every = space.pipelines(replace(sizes, overlap="none"), pins)
        overlapped = replace(sizes, overlap=overlap)
        kept = {*space.pipelines(overlapped, pins)}
        for pipeline, modules in itertools.product(every, space.recomputes(pins)):
            layout = replace(pipeline, overlap=overlap)
            if layout not in kept or not table.dispatchers(replace(layout, recompute=modules)):
                assert not space.is_allowed(replace(layout, recompute=modules))


@pytest.mark.parametrize("target", [*TARGETS])
def test_what_a_space_allows_is_what_breaks_no_rule(target: str) -> None:
    """However many layouts were asked for: answers are kept by what the runtime's rules read."""
    job, answers = TrainingJob(decoder=OLMOE, world_size=8, global_batch=16, length=1024), set()
    space = search_of(job, target=target).space
    for sizes, zero in itertools.product(space.sizes(LayoutRequest()), ZERO_STAGES):
        for layout in space.pipelines(replace(sizes, zero=zero), LayoutRequest()):
            rules = broken_rules(layout, job), target_rules(layout, space.target, job, space.site)
            answers.add(space.is_allowed(layout))
            assert space.is_allowed(layout) == (not [*itertools.chain(*rules)])
    assert True in answers


@pytest.mark.parametrize("target", ["megatron", "bridge"])
@pytest.mark.parametrize(("decoder", "dtype"), [(OLMOE, "bfloat16"), (LITE, "fp8"), (LLAMA, "fp8")])
def test_graphs_spare_no_more_than_what_waits_for_launches(
    decoder: Decoder, dtype: TrainingDtype, target: str
) -> None:
    """And they go with no sizes that do not go without them."""
    job = TrainingJob(decoder=decoder, world_size=8, global_batch=64, length=1024, dtype=dtype)
    search, checked = search_of(job, target=target), 0
    plain = {_group(bound.group): bound for bound in LayoutTable.of(search, LayoutRequest()).bounds}
    for graphs in ("partial", "full"):
        for bound in LayoutTable.of(search, LayoutRequest(cuda_graphs=graphs)).bounds:
            checked += 1
            assert plain[_group(bound.group)].bare_seconds <= bound.seconds * SAME
    assert checked > 20


@pytest.mark.parametrize("num_kinds", [1, 2, 3, 5])
def test_the_cheapest_blocks_are_those_that_take_least(num_kinds: int) -> None:
    rng = np.random.default_rng(num_kinds)
    counts = rng.integers(1, 9, num_kinds).astype(float)
    sizes = rng.uniform(0.0, 1.0, (2, 3, 2, 4, num_kinds))
    for num in range(1, int(counts.sum()) + 1):
        least = cheapest(np.array([[[num]], [[num - 1.0]]]), counts, sizes)
        for at in np.ndindex(least.shape):
            blocks = np.sort(np.repeat(sizes[at], counts.astype(int)))
            assert least[at] == pytest.approx(blocks[: num - at[2]].sum())


@pytest.mark.unmeasured
@pytest.mark.parametrize("may_offload", [False, True])
@pytest.mark.parametrize(
    ("target", "tight"),
    [
        ("megatron", (0.95, 0.7)), ("torchtitan", (0.95, 0.7)),
        ("deepspeed", (0.8, 0.55)),  # whose logits, which no bound has, take most
    ],
)  # fmt: skip
def test_no_layout_needs_less_memory_than_its_bound(
    target: str, tight: tuple[float, float], *, may_offload: bool
) -> None:
    decoder = replace(LITE, blocks=LITE.blocks[:10], family="mixtral")  # DeepSpeed cuts its heads
    job = TrainingJob(decoder=decoder, world_size=8, global_batch=16, length=2048)
    search, pins = search_of(job, target=target, gib=float("inf")), LayoutRequest(micro_batch=1)
    table, ratios = LayoutTable(search=search, pins=pins), list[float]()
    loose: list[float] = []
    for group in table.groups:
        for layout, *bounds in table.rows(group):
            bound = bounds[0 if may_offload else 1]
            for cut in itertools.chain.from_iterable(map(table.zero_stages, table.cuts(layout))):
                least = search.fitting.memory.needs(cut)[0]
                if may_offload:
                    wait = replace(cut, offload_activations=0.9)
                    able = [to for to in (cut, wait) if search.space.is_allowed(to)]
                    shares = (0.0, 1.0) if search.target.offloads_optimizer else (0.0,)
                    least = min(
                        search.fitting.memory.needs(to, on_host=share)[0]
                        for to, share in itertools.product(able, shares)
                        if share == 0 or to.zero == 1
                    )
                assert bound <= least * SAME
                # Overlap with sharded gradients has one bound for all of its ZeRO stages.
                (loose if cut.overlap == "batch" and cut.zero > 1 else ratios).append(bound / least)
    assert max(ratios) > tight[0]
    assert sum(ratios) / len(ratios) > tight[1]
    assert not loose or sum(loose) / len(loose) > 0.55
