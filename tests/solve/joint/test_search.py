"""The search over layouts, against every combination of sizes tried one by one."""

import itertools
from dataclasses import replace

import pytest

from moetune.domain.errors import InputError, RefusedLayoutError
from moetune.domain.pipeline import SCHEDULES, even_stages, read_stages
from moetune.domain.target_rules import target_rules
from moetune.domain.targets import find_target
from moetune.domain.training import (
    TOKEN_DISPATCHERS,
    FoldedLayout,
    LayoutRequest,
    TrainingJob,
)
from moetune.domain.training_rules import broken_rules
from moetune.fit.costs import costs_of
from moetune.huggingface.registry import named_model
from moetune.solve.joint import ties as ties_module
from moetune.solve.joint.best import BestLayouts, best_layouts
from moetune.solve.joint.search import FoldedSearch
from moetune.solve.joint.ties import NOISE
from moetune.solve.training.machine import DevicePrices
from moetune.solve.training.memory import MemoryModel
from moetune.solve.training.stages import DecoderStages
from moetune.solve.training.step import StepPrices
from moetune.workflows.files import bundled_profiles, load_profile_file
from tests.solve.joint.brute_force import every_layout, fitting, layouts_of

H100 = load_profile_file(bundled_profiles()["h100-x8"])
OLMOE = named_model("olmoe").decoder


def search_of(job: TrainingJob, *, target: str = "megatron", gib: float = 70) -> FoldedSearch:
    device = DevicePrices(costs=costs_of(H100, allow_modelled=True), machine=H100.machine)
    stages, runtime = DecoderStages(job.decoder), find_target(target)
    return FoldedSearch(
        job=job,
        prices=StepPrices(job=job, device=device, stages=stages, target=runtime),
        memory=MemoryModel(job=job, stages=stages),
        limit_bytes=gib * 2**30,
        target=runtime,
    )


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("target", "gib", "pins"),
    [
        ("megatron", 34.0, LayoutRequest(tp=1, pp=2, micro_batch=2)),
        ("megatron", 20.0, LayoutRequest(pp=1, tp=1, micro_batch=1)),
        ("torchtitan", 24.0, LayoutRequest(tp=1, pp=4, micro_batch=1)),
        ("moetune", 30.0, LayoutRequest(tp=1, micro_batch=1)),
    ],
)
def test_no_layout_that_fits_is_faster(target: str, gib: float, pins: LayoutRequest) -> None:
    job = TrainingJob(decoder=OLMOE, world_size=8, global_batch=32, length=2048)
    search = search_of(job, target=target, gib=gib)
    best = min(one.step.seconds for one in fitting(search, every_layout(search, pins)))
    assert best <= best_layouts(search, pins)[0].step.seconds <= best * (1 + NOISE)


@pytest.mark.parametrize(
    ("gib", "pins"),
    [(70.0, LayoutRequest()), (20.0, LayoutRequest(pp=1)), (2.0, LayoutRequest(micro_batch=1))],
)
@pytest.mark.parametrize("target", ["moetune", "megatron"])
def test_the_best_one_is_the_same_whether_others_are_asked_for_or_not(
    target: str, gib: float, pins: LayoutRequest
) -> None:
    job = TrainingJob(decoder=OLMOE, world_size=16, global_batch=64, length=2048)
    layouts = BestLayouts(search_of(job, target=target, gib=gib), pins)
    best = layouts.best()
    every = best_layouts(search_of(job, target=target, gib=gib), pins)
    assert best == every[0] == layouts.best()
    assert layouts.ranked() == every == layouts.ranked()


@pytest.mark.parametrize(
    "target", ["moetune", "megatron", "torchtitan", "transformers", "deepspeed"]
)
def test_a_target_gets_only_what_it_can_run(target: str) -> None:
    job = TrainingJob(decoder=OLMOE, world_size=8, global_batch=32, length=2048)
    search = search_of(job, target=target)
    for one in best_layouts(search, LayoutRequest()):
        assert list(target_rules(one.layout, search.target, job)) == []
        assert list(broken_rules(one.layout, job)) == []


def test_experts_are_cut_as_far_as_attention_where_the_runtime_can() -> None:
    job = TrainingJob(decoder=OLMOE, world_size=8, global_batch=32, length=2048)
    found = {
        target: {(one.tp, one.etp) for one in search_of(job, target=target).space.shapes(
            LayoutRequest(micro_batch=1, pp=1)
        )}
        for target in ("megatron", "torchtitan", "moetune")
    }  # fmt: skip
    assert found["torchtitan"] == {(1, 1), (2, 1), (4, 1), (8, 1)}
    assert found["moetune"] == {(1, 1)}
    assert found["megatron"] == {(tp, etp) for tp in (1, 2, 4, 8) for etp in (1, 2, 4, 8)
                                 if etp <= tp}  # fmt: skip


def test_a_dense_model_has_no_experts_to_cut() -> None:
    job = TrainingJob(
        decoder=named_model("llama-3-8b").decoder, world_size=8, global_batch=8, length=2048
    )
    shapes = search_of(job).space.shapes(LayoutRequest(tp=2, pp=1))
    assert {(one.ep, one.etp) for one in shapes} == {(1, 1)}


def test_experts_are_cut_where_whole_ones_do_not_fit() -> None:
    """Mixtral-8x22B without a pipeline: each of eight ranks of ep has a whole expert of a block."""
    mixtral = named_model("mixtral-8x22b").decoder
    job = TrainingJob(decoder=mixtral, world_size=64, global_batch=64, length=4096)
    search = search_of(job, gib=60, target="megatron")
    pins = LayoutRequest(tp=8, pp=1, zero=1, offload_activations=0.0, offload_optimizer=0.0)
    found = best_layouts(search, pins)[0]
    whole = best_layouts(search, replace(pins, etp=1))[0]
    assert found.layout.etp > 1
    assert found.memory.peak_bytes <= search.limit_bytes < whole.memory.peak_bytes


def test_what_a_search_answers_is_among_all_layouts() -> None:
    job = TrainingJob(decoder=OLMOE, world_size=8, global_batch=32, length=2048)
    search, pins = search_of(job, target="moetune"), LayoutRequest()
    every = {*layouts_of(search.space, pins)}
    assert all(map(search.space.is_allowed, every))
    answers = best_layouts(search, pins)
    assert answers
    assert {replace(one.layout, stages=None, degree=None) for one in answers} <= every


@pytest.mark.parametrize(
    ("target", "pins", "what"),
    [
        ("torchtitan", LayoutRequest(tp=2, etp=2), "etp 2"),
        ("moetune", LayoutRequest(tp=2, etp=2), "etp 2"),
        (
            "moetune",
            LayoutRequest(pp=2, schedule="zero_bubble", recompute=("full",)),
            "recomputation with zero_bubble",
        ),
        ("torchtitan", LayoutRequest(recompute=("moe_act",)), "recomputation of moe_act"),
        ("transformers", LayoutRequest(pp=2), "pp 2"),
        ("megatron", LayoutRequest(pp=2, vpp=1, ep=4, overlap="batch"), "virtual stages"),
        ("megatron", LayoutRequest(tp=3), "does not divide world_size"),
        ("megatron", LayoutRequest(ep=16), "ep"),
        ("megatron", LayoutRequest(ep=1, overlap="batch"), "ep 1"),
        ("megatron", LayoutRequest(ep=8, overlap="batch", dispatcher="all_gather"), "all_gather"),
        ("megatron", LayoutRequest(ep=8, overlap="batch", recompute=("moe",)), "moe"),
        ("megatron", LayoutRequest(pp=2, zero=3), "ZeRO-3"),
        ("megatron@0.17", LayoutRequest(pp=1, ep=4, zero=3, overlap="batch"), "Megatron-FSDP"),
        ("bridge@0.4", LayoutRequest(pp=1, ep=4, zero=2, overlap="batch"), "Megatron-FSDP"),
        ("torchtitan", LayoutRequest(cuda_graphs="partial"), "CUDA graphs partial"),
        ("megatron@0.16", LayoutRequest(cuda_graphs="full"), "full CUDA graphs of a model"),
        ("megatron", LayoutRequest(cuda_graphs="partial", recompute=("moe",)), "partial CUDA"),
        ("moetune", LayoutRequest(pp=4, ep=8), "ep"),
    ],
)
def test_pins_that_cannot_be_are_refused_by_name(
    target: str, pins: LayoutRequest, what: str
) -> None:
    job = TrainingJob(decoder=OLMOE, world_size=8, global_batch=32, length=2048)
    with pytest.raises((InputError, RefusedLayoutError), match=what):
        best_layouts(search_of(job, target=target), pins)


def test_the_parts_of_a_step_and_of_the_memory_add_up() -> None:
    job = TrainingJob(decoder=OLMOE, world_size=8, global_batch=32, length=2048)
    for one in best_layouts(search_of(job), LayoutRequest()):
        assert sum(one.step.parts.values()) == pytest.approx(one.step.seconds)
        assert sum(one.memory.parts.values()) == pytest.approx(one.memory.peak_bytes)
        by_module = sum(one.memory.activations.values())
        assert by_module == pytest.approx(one.memory.parts["activations"])


def test_where_nothing_fits_the_smallest_layout_is_priced() -> None:
    job = TrainingJob(decoder=OLMOE, world_size=8, global_batch=32, length=2048)
    (one,) = best_layouts(search_of(job, gib=2), LayoutRequest())
    assert one.memory.peak_bytes > 2 * 2**30
    assert one.step.seconds > 0


def test_what_is_pinned_is_kept() -> None:
    job = TrainingJob(decoder=OLMOE, world_size=8, global_batch=32, length=2048)
    pins = LayoutRequest(
        cp=2, tp=1, pp=2, vpp=2, ep=2, etp=1, micro_batch=2, recompute=("moe_act",), zero=0,
        dispatcher="deepep", overlap="batch",
    )  # fmt: skip
    (one,) = best_layouts(search_of(job), pins)
    assert one.layout == FoldedLayout(
        dp=2, cp=2, pp=2, vpp=2, ep=2, micro_batch=2, recompute=("moe_act",), zero=0,
        dispatcher="deepep", overlap="batch",
    )  # fmt: skip


def test_a_global_batch_that_nothing_divides_is_refused() -> None:
    job = TrainingJob(decoder=OLMOE, world_size=8, global_batch=7, length=2049)
    with pytest.raises(InputError, match="global_batch"):
        best_layouts(search_of(job, target="transformers"), LayoutRequest())


def test_long_sequences_are_shared_where_that_is_needed() -> None:
    job = TrainingJob(decoder=OLMOE, world_size=8, global_batch=8, length=131_072)
    pins = LayoutRequest(tp=1, pp=1, recompute=())
    assert best_layouts(search_of(job, gib=40), pins)[0].layout.cp > 1
    short = replace(job, length=4096)
    assert {one.layout.cp for one in best_layouts(search_of(short), LayoutRequest())} == {1}


def test_no_schedule_is_faster_than_the_best_that_torchtitan_has() -> None:
    job = TrainingJob(decoder=OLMOE, world_size=8, global_batch=32, length=2048)
    search = search_of(job, target="torchtitan")
    pins = LayoutRequest(tp=1, pp=4, ep=2, micro_batch=1, recompute=())
    every = []
    for vpp, schedule in itertools.product(range(1, 5), SCHEDULES):
        layout = FoldedLayout(
            dp=2, pp=4, vpp=vpp, ep=2, schedule=schedule, zero=2, dispatcher="all_to_all"
        )
        if next(broken_rules(layout, job), None) is None and vpp != 3:
            every += [layout, search.prices.balanced(layout)]
    assert {one.order for one in every} == {*SCHEDULES}
    fastest = min(search.priced(one).step.seconds for one in every)
    found = best_layouts(search, pins)[0]
    assert found.step.seconds <= fastest * (1 + NOISE)
    only = best_layouts(search, replace(pins, schedule="1f1b"))[0]
    assert only.layout.order == "1f1b"
    assert only.step.seconds > found.step.seconds


def test_a_head_that_takes_long_has_fewer_blocks_beside_it() -> None:
    qwen = named_model("qwen3-30b-a3b").decoder
    job = TrainingJob(decoder=qwen, world_size=32, global_batch=256, length=4096)
    search = search_of(job)
    pins = LayoutRequest(tp=1, cp=1, pp=4, vpp=1, ep=8, micro_batch=1)
    one = best_layouts(search, pins)[0]
    sizes = [word.count("t") for word in one.layout.stages_of(qwen)]
    assert sizes[-1] < min(sizes[:-1])
    even = search.priced(replace(one.layout, stages=None))
    assert one.step.seconds * (1 + NOISE) < even.step.seconds
    by_hand = replace(pins, stages=even_stages(48, 0, 4))
    assert best_layouts(search, by_hand)[0].layout.stages == by_hand.stages


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
    found = search_of(job).prices.balanced(layout).stages
    assert found == read_stages(stages)


def test_of_layouts_that_tie_one_that_leaves_memory_free_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ties_module, "NOISE", 0.05)  # few real layouts tie within 1 %
    job = TrainingJob(decoder=OLMOE, world_size=8, global_batch=256, length=4096)
    pins = LayoutRequest(tp=1, pp=1, ep=8, micro_batch=2, overlap="none", dispatcher="deepep")
    layout = FoldedLayout(dp=8, ep=8, micro_batch=2, dispatcher="deepep")
    fastest, other = (
        search_of(job).priced(replace(layout, recompute=one)) for one in ((), ("moe_act", "norm"))
    )
    assert fastest.step.seconds < other.step.seconds < 1.05 * fastest.step.seconds
    gib = fastest.memory.peak_bytes / 2**30
    for share, recompute in ((0.94, ()), (0.97, ("moe_act", "norm"))):
        assert best_layouts(search_of(job, gib=gib / share), pins)[0].layout.recompute == recompute
    # Where none leaves as much free, the simplest is taken.
    pinned = replace(pins, recompute=())
    assert best_layouts(search_of(job, gib=gib / 0.97), pinned)[0].layout.recompute == ()


def test_gradients_that_wait_for_their_products_take_memory() -> None:
    job = TrainingJob(decoder=OLMOE, world_size=8, global_batch=32, length=2048)
    layout = FoldedLayout(dp=4, pp=2, vpp=2, ep=4, schedule="zero_bubble")
    memory, target = search_of(job).memory, find_target("moetune")
    kept = target.kept_by_experts
    without, waiting = (
        replace(memory, target=replace(target, kept_by_experts=replace(kept, gradients_wait=one)))
        .peak(layout)
        .parts["activations"]
        for one in (False, True)
    )
    assert waiting > without


@pytest.mark.unmeasured
def test_buffers_of_the_fastest_dispatcher_hide_no_other_that_fits() -> None:
    """HybridEP's are of all of its ranks' tokens."""
    job = TrainingJob(decoder=OLMOE, world_size=16, global_batch=32, length=4096)
    pins = LayoutRequest(tp=1, pp=1, ep=16, micro_batch=2, overlap="none", recompute=(), zero=1)
    search = search_of(job, target="megatron", gib=float("inf"))
    peaks = {
        name: search.memory.needs(FoldedLayout(dp=16, ep=16, micro_batch=2, dispatcher=name))[0]
        for name in TOKEN_DISPATCHERS
    }
    assert peaks["hybrid_ep"] > peaks["all_to_all"]
    hybrid = replace(pins, dispatcher="hybrid_ep", offload_optimizer=0.0, offload_activations=0.0)
    limit = (peaks["hybrid_ep"] + peaks["all_to_all"]) / 2
    tight = replace(search, limit_bytes=limit)
    assert not tight.fits(best_layouts(tight, hybrid)[0].layout)
    found = best_layouts(tight, replace(hybrid, dispatcher=None))[0]
    assert tight.fits(found.layout)
    assert found.layout.dispatcher != "hybrid_ep"
