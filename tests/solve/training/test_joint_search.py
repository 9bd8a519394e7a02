"""The joint search against every layout of small jobs, its bounds, and pins against no pins."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moetune.domain.training import LayoutRequest, TrainingJob
from moetune.solve.training import ties as ties_module
from moetune.solve.training.search import FoldedSearch
from tests.solve.training.brute_force import fitting
from tests.solve.training.test_search import OLMOE, search_of

SMALL = replace(OLMOE, blocks=OLMOE.blocks[:4])
SAME = 1e-9


def small_search(
    *, target: str, ranks: int, batch: int, length: int, gib: float, host_gib: float
) -> FoldedSearch:
    job = TrainingJob(decoder=SMALL, world_size=ranks, global_batch=batch, length=length)
    return replace(search_of(job, target=target, gib=gib), host_bytes=host_gib * 2**30)


SEARCHES = st.builds(
    small_search,
    target=st.sampled_from(["megatron", "torchtitan", "moetune", "deepspeed", "transformers"]),
    ranks=st.sampled_from([2, 4]),
    batch=st.sampled_from([4, 8, 12]),
    length=st.sampled_from([1024, 4096]),
    gib=st.one_of(st.floats(4.0, 16.0), st.floats(4.0, 60.0)),
    host_gib=st.sampled_from([4.0, 64.0, float("inf")]),
)
PINS = st.builds(
    LayoutRequest,
    micro_batch=st.sampled_from([1, 2]),
    tp=st.sampled_from([1, 2]),
    zero=st.sampled_from([None, None, 1, 2, 3]),
    pp=st.sampled_from([None, 1, 2]),
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(search=SEARCHES, pins=PINS)
def test_the_best_is_that_of_every_layout_priced(
    monkeypatch: pytest.MonkeyPatch, search: FoldedSearch, pins: LayoutRequest
) -> None:
    monkeypatch.setattr(ties_module, "NOISE", 0.0)
    every = fitting(search, pins)
    if not every:
        return
    fastest = min(one.step.seconds for one in every)
    found = search.best(pins)
    assert search.fits(found[0].layout)
    assert found[0].step.seconds == pytest.approx(fastest, rel=SAME)
    layouts = {one.layout for one in every}
    assert {replace(one.layout, degree=None) for one in found} <= layouts


@pytest.mark.covered
@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
@pytest.mark.parametrize("gib", [9.0, 20.0])
def test_no_pin_finds_a_faster_plan(target: str, gib: float) -> None:
    job = TrainingJob(decoder=OLMOE, world_size=16, global_batch=64, length=2048)
    search = search_of(job, target=target, gib=gib)
    free = search.best(LayoutRequest())[0]
    pins = [
        *(LayoutRequest(zero=one) for one in search.target.zero),
        LayoutRequest(pp=1), LayoutRequest(pp=2), LayoutRequest(recompute=("full",)),
        LayoutRequest(dispatcher="all_to_all"), LayoutRequest(micro_batch=1),
    ]  # fmt: skip
    for one in pins:
        found = search.best(one)[0]
        assert not search.fits(found.layout) or free.step.seconds <= found.step.seconds * 1.01
