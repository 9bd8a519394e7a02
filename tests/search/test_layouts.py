"""Layouts beyond branch and bound: against all that there are, and against the seeds."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from moetune.domain.errors import InputError, RefusedLayoutError
from moetune.domain.pipeline import stages_of_sizes
from moetune.domain.training import RECOMPUTES, FoldedLayout, LayoutRequest, TrainingJob
from moetune.search import LayoutStudy
from moetune.solve.joint.best import BestLayouts
from moetune.solve.joint.front import memory_front
from moetune.solve.joint.search import FoldedSearch
from moetune.solve.joint.ties import NOISE, PricedLayout
from tests.solve.joint.brute_force import is_allowed
from tests.solve.joint.test_joint_search import TARGETS, small_search
from tests.solve.joint.test_search import OLMOE, search_of

PINS = LayoutRequest(
    cp=1, tp=1, pp=2, vpp=1, etp=1, micro_batch=1, zero=1, overlap="none", dispatcher="all_to_all",
    schedule="1f1b", offload_optimizer=0.0,
)  # fmt: skip


def every_layout(search: FoldedSearch) -> Iterator[FoldedLayout]:
    """Yield every allowed layout with the pins above: any stages, any modules recomputed."""
    job = search.job
    modules = [one for one in RECOMPUTES if one in job.decoder.modules]
    lists = [
        one for size in range(len(modules) + 1) for one in itertools.combinations(modules, size)
    ]
    cuts = [stages_of_sizes((first, 4 - first), len(job.decoder.predictions)) for first in range(5)]
    dp = job.world_size // 2
    for recompute, stages, ep in itertools.product(lists, (None, *cuts), (1, 2)):
        one = FoldedLayout(dp=dp, pp=2, ep=ep, recompute=recompute, stages=stages, schedule="1f1b")
        if is_allowed(search, one):
            yield one


def seeds_of(search: FoldedSearch, pins: LayoutRequest) -> list[PricedLayout]:
    return BestLayouts(search, pins).ranked()


def fits(search: FoldedSearch, one: PricedLayout) -> bool:
    return search.fitting.fits_into(one.memory.peak_bytes, one.memory.host_bytes)


@pytest.mark.parametrize("quantile", [0.05, 0.2, 0.4, 0.8])
def test_of_few_layouts_it_finds_the_fastest_that_fits(quantile: float) -> None:
    search = small_search(target="megatron", ranks=4, batch=8, length=4096)
    every = [search.priced(one) for one in every_layout(search)]
    peaks = sorted(one.memory.peak_bytes for one in every)
    search = replace(search, limit_bytes=peaks[int(quantile * len(peaks))])
    seeds = seeds_of(search, PINS)
    study = LayoutStudy(search, PINS, seeds)
    tried = [study.try_next() for _ in range(400)]
    fastest = min(one.step.seconds for one in every if fits(search, one))
    found = min(one.step.seconds for one in (*seeds, *tried) if fits(search, one))
    assert found == pytest.approx(fastest, rel=1e-9)
    [best, *_] = study.ranked() or seeds
    assert fits(search, best)
    assert best.step.seconds <= fastest / (1 - NOISE) * (1 + 1e-9)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    target=st.sampled_from(TARGETS),
    ranks=st.sampled_from([2, 4, 8]),
    batch=st.sampled_from([8, 12]),
    pins=st.builds(
        LayoutRequest,
        micro_batch=st.sampled_from([None, 1]),
        tp=st.sampled_from([None, 1]),
        pp=st.sampled_from([None, 1]),
        ep=st.sampled_from([None, 2]),
        recompute=st.sampled_from([None, ()]),
        offload_optimizer=st.sampled_from([None, 0.0]),
        stages=st.sampled_from([None, None, ("Ettt", "tL")]),
    ),
    quantile=st.sampled_from([0.05, 0.5, 0.95]),
)
def test_whatever_it_tries_is_allowed_and_its_answer_is_never_worse(
    target: str, ranks: int, batch: int, pins: LayoutRequest, quantile: float
) -> None:
    search = small_search(target=target, ranks=ranks, batch=batch, length=2048)
    try:
        front = memory_front(search, pins)
    except (InputError, RefusedLayoutError):  # the target has no such layout
        reject()
    search = replace(search, limit_bytes=front[int(quantile * len(front))].memory.peak_bytes)
    seeds = seeds_of(search, pins)
    study = LayoutStudy(search, pins, (*seeds, *front))
    for one in [study.try_next() for _ in range(100)]:
        assert is_allowed(search, one.layout)
        assert all(
            getattr(one.layout, name) == value
            for name in (
                "micro_batch",
                "tp",
                "pp",
                "ep",
                "recompute",
                "offload_optimizer",
                "stages",
            )
            if (value := getattr(pins, name)) is not None
        )
        again = search.priced(one.layout)
        assert (again.step.seconds, again.memory) == (one.step.seconds, one.memory)
    ranked = study.ranked()
    if ranked:
        assert fits(search, ranked[0])
        assert ranked[0].step.seconds <= seeds[0].step.seconds * (1 - NOISE)
    merged = study.front(front)
    for one in front:
        assert any(
            two.memory.peak_bytes <= one.memory.peak_bytes and two.step.seconds <= one.step.seconds
            for two in merged
        )


def test_as_many_tries_find_the_same() -> None:
    search = search_of(TrainingJob(decoder=OLMOE, world_size=8, global_batch=32, length=2048))
    seeds = seeds_of(search, LayoutRequest())
    runs = []
    for _ in range(2):
        study = LayoutStudy(search, LayoutRequest(), seeds)
        runs.append([study.try_next().layout for _ in range(120)])
    assert runs[0] == runs[1]
    assert len({*runs[0]}) > 100


def test_where_nothing_of_branch_and_bound_fits_it_finds_what_does() -> None:
    decoder, pins = replace(OLMOE, blocks=OLMOE.blocks[:5]), replace(PINS, pp=4)
    job = TrainingJob(decoder=decoder, world_size=4, global_batch=8, length=4096)
    search = replace(search_of(job), limit_bytes=1.0)
    [smallest] = seeds_of(search, pins)
    stages = stages_of_sizes((1, 1, 2, 1), 0)
    able = search.priced(replace(smallest.layout, stages=stages))
    assert able.memory.peak_bytes < smallest.memory.peak_bytes
    search = replace(search, limit_bytes=able.memory.peak_bytes)
    study = LayoutStudy(search, pins, seeds_of(search, pins))
    assert not study.ranked()
    for _ in range(100):
        study.try_next()
    assert study.ranked()[0].layout.stages == stages
