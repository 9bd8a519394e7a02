"""The best layouts and the front of small jobs against every layout, priced one by one."""

import itertools
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moetune.domain.errors import InputError, RefusedLayoutError
from moetune.domain.pipeline import even_stages, read_stages
from moetune.domain.training import FoldedLayout, LayoutRequest, TrainingJob
from moetune.huggingface.registry import named_model
from moetune.solve.model import best as best_module
from moetune.solve.model.alternatives import memory_front
from moetune.solve.model.best import BestLayouts
from moetune.solve.model.search import NOISE, FoldedSearch
from tests.solve.model.brute_force import OLMOE, every_layout, fitting, search_of


def test_the_parts_of_a_step_and_of_the_memory_add_up() -> None:
    job = TrainingJob(decoder=OLMOE, world_size=8, global_batch=32, length=2048)
    for priced in BestLayouts(search_of(job), LayoutRequest()).ranked():
        assert sum(priced.step.parts.values()) == pytest.approx(priced.step.seconds)
        assert sum(priced.memory.parts.values()) == pytest.approx(priced.memory.peak_bytes)
        by_module = sum(priced.memory.activations.values())
        assert by_module == pytest.approx(priced.memory.parts["activations"])


def test_a_head_that_takes_long_has_fewer_blocks_next_to_it() -> None:
    qwen = named_model("qwen3-30b-a3b").decoder
    job = TrainingJob(decoder=qwen, world_size=32, global_batch=256, length=4096)
    search = search_of(job)
    pins = LayoutRequest(tp=1, cp=1, pp=4, vpp=1, ep=8, micro_batch=1)
    best = BestLayouts(search, pins).ranked()[0]
    sizes = [word.count("t") for word in best.layout.stages_of(qwen)]
    assert sizes[-1] < min(sizes[:-1])
    even = search.price(replace(best.layout, stages=None))
    assert best.step.seconds * (1 + NOISE) < even.step.seconds
    by_hand = replace(pins, stages=even_stages(48, 0, 4))
    assert BestLayouts(search, by_hand).ranked()[0].layout.stages == by_hand.stages


@pytest.mark.parametrize(
    ("pp", "vpp", "stages"),
    [
        (4, 1, "Et*16|(t*16|)*2t*13mL"),
        (8, 1, "Et*8|(t*8|)*6t*5mL"),
        (4, 2, "Et*8|(t*8|)*6t*5mL"),
        (16, 1, "Et*4|(t*4|)*14tmL"),
        (8, 2, "Et*4|(t*4|)*14tmL"),
        (4, 4, "Et*4|(t*4|)*14tmL"),
    ],
)
def test_balanced_stages_of_deepseek_v3_are_those_that_megatron_bridge_ships(
    pp: int, vpp: int, stages: str
) -> None:
    """Megatron-Bridge, recipes/deepseek/h100/deepseek_v3.py, `_get_deepseek_v3_pipeline_layout`."""
    deepseek = named_model("deepseek-v3").decoder
    job = TrainingJob(decoder=deepseek, world_size=1024, global_batch=8192, length=4096)
    layout = FoldedLayout(dp=512 // pp, tp=2, pp=pp, vpp=vpp, ep=32, dispatcher="deepep")
    letters = search_of(job).prices.balanced_stages(layout)
    assert letters == read_stages(stages)


def test_of_layouts_that_tie_the_roomier_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(best_module, "NOISE", 0.05)  # few real layouts tie within 1 %
    job = TrainingJob(decoder=OLMOE, world_size=8, global_batch=256, length=4096)
    pins = LayoutRequest(tp=1, pp=1, ep=8, micro_batch=2, overlap="none", dispatcher="deepep")
    layout = FoldedLayout(dp=8, ep=8, micro_batch=2, dispatcher="deepep")
    fastest, other = (
        search_of(job).price(replace(layout, recompute=ops)) for ops in ((), ("moe_act", "norm"))
    )
    assert fastest.step.seconds < other.step.seconds < 1.05 * fastest.step.seconds
    gib = fastest.memory.peak_bytes / 2**30
    for share, recompute in ((0.94, ()), (0.97, ("moe_act", "norm"))):
        assert (
            BestLayouts(search_of(job, gib=gib / share), pins).ranked()[0].layout.recompute
            == recompute
        )
    # Where none leaves as much free, the simplest is taken.
    pinned = replace(pins, recompute=())
    assert BestLayouts(search_of(job, gib=gib / 0.97), pinned).ranked()[0].layout.recompute == ()


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
    peaks = sorted(search.fitting.memory.peak(layout).peak_bytes for layout in every)
    limit = peaks[int(question.quantile * len(peaks))] if question.quantile >= 0 else peaks[0] - 1
    search = replace(search, limit_bytes=limit)
    ranked = BestLayouts(search, pins).ranked()
    priced = fitting(search, every)
    if not priced:
        assert not search.fits(ranked[0].layout)
        plain = [row for row in every if pins.offload_optimizer is not None or not row.on_host]
        least = min(
            search.fitting.memory.peak(layout).peak_bytes
            for layout in plain
            if not layout.offload_activations
        )
        assert ranked[0].memory.peak_bytes == pytest.approx(least, rel=SAME)
        return
    assert search.fits(ranked[0].layout)
    fastest = min(row.step.seconds for row in priced)
    assert ranked[0].step.seconds == pytest.approx(fastest, rel=SAME)
    assert {replace(row.layout, degree=None) for row in ranked} <= {row.layout for row in priced}


JOB = TrainingJob(decoder=OLMOE, world_size=8, global_batch=32, length=2048)


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("target", "pins"),
    [
        pytest.param("megatron", LayoutRequest(tp=1, micro_batch=2), marks=pytest.mark.thorough),
        ("megatron", LayoutRequest(pp=1, tp=1, micro_batch=1)),
        ("torchtitan", LayoutRequest(tp=1, pp=4, micro_batch=1)),
        ("moetune", LayoutRequest(micro_batch=1)),
    ],
)
def test_for_no_memory_is_a_layout_faster_than_the_front(target: str, pins: LayoutRequest) -> None:
    search = search_of(JOB, target=target)
    priced = map(search.price, every_layout(search, pins))
    every = [(row.memory.peak_bytes, row.step.seconds) for row in priced]
    front = [(row.memory.peak_bytes, row.step.seconds) for row in memory_front(search, pins)]
    assert front == sorted(front)
    assert all(after[1] <= before[1] * (1 - NOISE) for before, after in itertools.pairwise(front))
    assert {*front} <= {*every}
    fastest, least = float("inf"), float("inf")
    left = [*front]
    for memory, seconds in sorted({*every}):
        fastest = min(fastest, seconds)
        while left and left[0][0] <= memory:
            least = min(least, left.pop(0)[1])
        assert fastest <= least <= fastest / (1 - NOISE) * (1 + 1e-9)


def test_pins_that_nothing_obeys_are_refused() -> None:
    for pins in (LayoutRequest(tp=3), LayoutRequest(pp=2, vpp=1, ep=4, overlap="batch")):
        with pytest.raises((InputError, RefusedLayoutError)):
            memory_front(search_of(JOB), pins)
