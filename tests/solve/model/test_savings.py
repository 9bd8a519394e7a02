"""Savings of single flags: each is the best layout of the question with that flag."""

from dataclasses import replace
from typing import Any

import pytest

from moetune.app.training_plan import saving_of
from moetune.domain.pipeline import read_stages
from moetune.domain.training import LayoutRequest, TrainingJob
from moetune.solve.model.alternatives import LEAST_SAVED, Savings
from moetune.solve.model.best import BestLayouts
from moetune.solve.model.search import FoldedSearch, PricedLayout
from tests.solve.model.brute_force import OLMOE, search_of

SMALL = replace(OLMOE, blocks=OLMOE.blocks[:8])


@pytest.fixture(scope="module")
def search() -> FoldedSearch:
    job = TrainingJob(decoder=SMALL, world_size=8, global_batch=64, length=4096)
    return search_of(job, target="megatron")


def changes_of(savings: Savings) -> dict[str, PricedLayout]:
    return {saving_of(saving, 1.0).change: saving.priced for saving in savings.of_flags()}


def savings_of(search: FoldedSearch, pins: LayoutRequest) -> Savings:
    return Savings(search=search, pins=pins, best=BestLayouts(search, pins).best())


def test_a_pin_that_is_left_out_has_the_value_of_the_best_layout(search: FoldedSearch) -> None:
    pins = LayoutRequest(tp=4, pp=2, micro_batch=1, cuda_graphs="none", zero=1)
    savings = savings_of(search, pins)
    changes = changes_of(savings)
    most = savings.best.step.seconds * (1 - LEAST_SAVED)
    for name in ("tp", "pp", "micro_batch", "zero"):
        best = BestLayouts(search, replace(pins, **{name: None})).best()
        flag = f"--{name.replace('_', '-')} {getattr(best.layout, name)}"
        if best.step.seconds < most:
            assert changes[flag].step.seconds == best.step.seconds
        else:
            assert flag not in changes
    assert changes
    ordered = [saving.priced.step.seconds for saving in savings.of_flags()]
    assert ordered == sorted(ordered)
    free = savings.free()
    assert free is not None
    assert free.priced.step.seconds == BestLayouts(search, LayoutRequest()).best().step.seconds


def test_graphs_that_a_layout_has_not_are_tried(search: FoldedSearch) -> None:
    pins = LayoutRequest(tp=4, micro_batch=1)
    changes = changes_of(savings_of(search, pins))
    graphs = BestLayouts(search, replace(pins, cuda_graphs="partial")).best()
    assert changes["--cuda-graphs partial"].step.seconds == graphs.step.seconds


def test_a_pin_that_the_best_layout_has_not_is_left_out(search: FoldedSearch) -> None:
    stages = read_stages("E|tttttt|t|tL")  # one rank has most of the blocks
    pins = LayoutRequest(pp=4, tp=1, ep=1, vpp=1, micro_batch=1, zero=1, stages=stages)
    best = BestLayouts(search, replace(pins, stages=None)).best()
    changes = changes_of(savings_of(search, pins))
    assert best.layout.stages is None
    changed = next(
        priced for change, priced in changes.items() if change.startswith("leaving out --stages")
    )
    assert changed.step.seconds == best.step.seconds


def test_a_question_without_pins_has_no_free_layout(search: FoldedSearch) -> None:
    assert savings_of(search, LayoutRequest()).free() is None


@pytest.mark.parametrize("share", [0.95, 1.05])
def test_a_step_without_recomputation_is_named_where_memory_alone_forbids_it(
    search: FoldedSearch, share: float
) -> None:
    pins = LayoutRequest(tp=1, pp=1, ep=1, micro_batch=4, zero=1, overlap="none",
                         offload_activations=0.0, offload_optimizer=0.0)  # fmt: skip
    plain = BestLayouts(search, replace(pins, recompute=())).best()
    tight = replace(search, limit_bytes=share * plain.memory.peak_bytes)
    changes = changes_of(savings_of(tight, pins))
    assert ("--recompute none" in changes) == (share < 1)
    if share < 1:
        assert changes["--recompute none"].step.seconds == plain.step.seconds
        assert changes["--recompute none"].memory.peak_bytes > tight.limit_bytes


@pytest.mark.parametrize("sequences", [64, 128])
def test_what_hides_more_collectives_is_named_where_memory_alone_forbids_it(sequences: int) -> None:
    job = TrainingJob(decoder=SMALL, world_size=64, global_batch=sequences, length=2048)
    search = search_of(job, target="deepspeed", gib=9)
    savings = savings_of(search, LayoutRequest())
    best, changes = savings.best, changes_of(savings)
    assert search.fits(best.layout)
    assert best.step.bound_by_replicas + best.step.parts["gradients"] > 0.1 * best.step.seconds
    # The micro-batch of 64 sequences on 64 ranks is 1 in any case.
    changes.pop("--recompute none", None)
    assert {*changes} == {"--zero 2"} | ({"--micro-batch 2"} if sequences > 64 else set())
    roomy = search_of(job, target="deepspeed", gib=80)
    for flag, saving in changes.items():
        name, value = flag.removeprefix("--").replace("-", "_").split()
        values: dict[str, Any] = {name: int(value)}
        pins = LayoutRequest(**values)
        assert saving.memory.peak_bytes > search.limit_bytes
        assert saving.step.seconds < best.step.seconds * (1 - LEAST_SAVED)
        assert BestLayouts(roomy, pins).best().step.seconds <= saving.step.seconds * 1.01
    pinned = savings_of(search, LayoutRequest(zero=3, micro_batch=1))
    assert not {*changes_of(pinned)} & {*changes}
