"""Bounds of partial layouts, in seconds and in bytes, against all layouts that they may become."""

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest

from moetune.domain.training import FoldedLayout, LayoutRequest, TrainingJob
from moetune.huggingface.registry import named_model
from moetune.solve.training.best import _Branch, _Branches
from moetune.solve.training.search import FoldedSearch
from tests.solve.training.brute_force import every_layout, fitting
from tests.solve.training.test_search import OLMOE, search_of

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


@pytest.mark.unmeasured
@pytest.mark.parametrize("may_offload", [False, True])
@pytest.mark.parametrize("target", ["megatron", "torchtitan", "deepspeed"])
def test_no_layout_needs_less_memory_than_its_bound(target: str, *, may_offload: bool) -> None:
    job = TrainingJob(
        decoder=replace(LITE, blocks=LITE.blocks[:10]), world_size=8, global_batch=16, length=2048
    )
    search, pins = search_of(job, target=target, gib=float("inf")), LayoutRequest(micro_batch=1)
    space, fits, table = search.space, search.fitting, search.dispatchers(pins)
    recomputes, ratios = space.recomputes(pins), []
    for sizes in space.sizes(pins):
        for overlapped in search.space.overlapped(sizes, pins):
            pipelines = [*space.pipelines(overlapped, pins)]
            bounds = fits.least_bytes(pipelines, recomputes, pins, may_offload=may_offload)
            for (one, row), (at, recompute) in itertools.product(
                zip(pipelines, bounds, strict=True), enumerate(recomputes)
            ):
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
                    assert row[at] <= least * SAME
                    ratios.append(row[at] / least)
    assert max(ratios) > 0.95
    assert sum(ratios) / len(ratios) > 0.7
