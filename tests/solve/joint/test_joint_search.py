"""The joint search against every layout of small jobs, its bounds, and pins against no pins."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moetune.domain.errors import InputError, RefusedLayoutError
from moetune.domain.training import LayoutRequest, TrainingJob
from moetune.solve.joint import best as best_module
from moetune.solve.joint.best import BestLayouts
from moetune.solve.joint.search import FoldedSearch
from tests.solve.joint.brute_force import every_layout, fitting
from tests.solve.joint.test_search import OLMOE, search_of

TARGETS = ("megatron", "bridge", "torchtitan", "moetune", "deepspeed", "transformers")
SMALL = replace(OLMOE, blocks=OLMOE.blocks[:4])
SAME = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A search of a small job without a limit of the device, pins, and how tight memory is to be.

    Args:
        quantile: of all layouts' peaks, the one that just fits; below 0 none does.
    """

    search: FoldedSearch
    pins: LayoutRequest
    quantile: float


def small_search(*, target: str, ranks: int, batch: int, length: int) -> FoldedSearch:
    job = TrainingJob(decoder=SMALL, world_size=ranks, global_batch=batch, length=length)
    return replace(search_of(job, target=target), limit_bytes=float("inf"))


@st.composite
def questions(draw: st.DrawFn) -> Question:
    """Return a question that has an answer but for its memory, or nearly so."""
    search = draw(
        st.builds(
            small_search,
            target=st.sampled_from(TARGETS),
            ranks=st.sampled_from([2, 4]),
            batch=st.sampled_from([4, 8, 12]),
            length=st.sampled_from([1024, 4096]),
        )
    )
    target = search.target
    pins = LayoutRequest(
        micro_batch=draw(st.sampled_from([1, 2])),
        tp=draw(st.sampled_from([1, 2])),
        pp=draw(st.sampled_from([None, 1, target.largest.get("pp", 2)])),
        ep=draw(st.sampled_from([None, None, 2])),
        zero=draw(st.sampled_from([None, None, *target.zero])),
        overlap=draw(st.sampled_from([None, None, *target.overlaps])),
        offload_optimizer=draw(
            st.sampled_from([None, None, 0.5] if target.offloads_optimizer else [None])
        ),
    )
    host_gib = draw(st.sampled_from([4.0, 64.0, float("inf")]))
    return Question(
        search=replace(search, host_bytes=host_gib * 2**30),
        pins=pins,
        quantile=draw(st.sampled_from([-1.0, 0.0, 0.01, 0.05, 0.2, 0.5])),
    )


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(question=questions())
def test_the_best_is_that_of_every_layout_priced(
    monkeypatch: pytest.MonkeyPatch, question: Question
) -> None:
    monkeypatch.setattr(best_module, "NOISE", 0.0)
    search, pins = question.search, question.pins
    every = [*every_layout(search, pins)]
    if not every:
        with pytest.raises((InputError, RefusedLayoutError)):
            BestLayouts(search, pins).ranked()
        return
    peaks = sorted(search.memory.peak(one).peak_bytes for one in every)
    limit = peaks[int(question.quantile * len(peaks))] if question.quantile >= 0 else peaks[0] - 1
    search = replace(search, limit_bytes=limit)
    found = BestLayouts(search, pins).ranked()
    priced = fitting(search, every)
    if not priced:
        assert not search.fits(found[0].layout)
        plain = [one for one in every if pins.offload_optimizer is not None or not one.on_host]
        least = min(
            search.memory.peak(one).peak_bytes for one in plain if not one.offload_activations
        )
        assert found[0].memory.peak_bytes == pytest.approx(least, rel=SAME)
        return
    assert search.fits(found[0].layout)
    fastest = min(one.step.seconds for one in priced)
    assert found[0].step.seconds == pytest.approx(fastest, rel=SAME)
    assert {replace(one.layout, degree=None) for one in found} <= {one.layout for one in priced}
