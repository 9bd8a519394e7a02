"""The search over layouts, against every combination of sizes tried one by one."""

from dataclasses import replace

import pytest

from moetune.domain.pipeline import even_stages, read_stages
from moetune.domain.targets import find_target
from moetune.domain.training import (
    FoldedLayout,
    LayoutRequest,
    TrainingJob,
)
from moetune.fit.costs import costs_of
from moetune.huggingface.registry import named_model
from moetune.solve.joint import best as best_module
from moetune.solve.joint.best import BestLayouts
from moetune.solve.joint.search import NOISE, FoldedSearch
from moetune.solve.training.machine import DevicePrices
from moetune.solve.training.stages import DecoderStages
from moetune.solve.training.step import StepPrices
from moetune.workflows.files import bundled_profiles, load_profile_file

H100 = load_profile_file(bundled_profiles()["h100-x8"])
OLMOE = named_model("olmoe").decoder


def search_of(job: TrainingJob, *, target: str = "megatron", gib: float = 70) -> FoldedSearch:
    device = DevicePrices(costs=costs_of(H100, allow_modelled=True), machine=H100.machine)
    stages, runtime = DecoderStages(job.decoder), find_target(target)
    prices = StepPrices(job=job, device=device, stages=stages, target=runtime)
    return FoldedSearch(wholes=prices, limit_bytes=gib * 2**30)


def test_the_parts_of_a_step_and_of_the_memory_add_up() -> None:
    job = TrainingJob(decoder=OLMOE, world_size=8, global_batch=32, length=2048)
    for one in BestLayouts(search_of(job), LayoutRequest()).ranked():
        assert sum(one.step.parts.values()) == pytest.approx(one.step.seconds)
        assert sum(one.memory.parts.values()) == pytest.approx(one.memory.peak_bytes)
        by_module = sum(one.memory.activations.values())
        assert by_module == pytest.approx(one.memory.parts["activations"])


def test_a_head_that_takes_long_has_fewer_blocks_beside_it() -> None:
    qwen = named_model("qwen3-30b-a3b").decoder
    job = TrainingJob(decoder=qwen, world_size=32, global_batch=256, length=4096)
    search = search_of(job)
    pins = LayoutRequest(tp=1, cp=1, pp=4, vpp=1, ep=8, micro_batch=1)
    one = BestLayouts(search, pins).ranked()[0]
    sizes = [word.count("t") for word in one.layout.stages_of(qwen)]
    assert sizes[-1] < min(sizes[:-1])
    even = search.priced(replace(one.layout, stages=None))
    assert one.step.seconds * (1 + NOISE) < even.step.seconds
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
    found = search_of(job).prices.balanced(layout).stages
    assert found == read_stages(stages)


def test_of_layouts_that_tie_one_that_leaves_memory_free_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(best_module, "NOISE", 0.05)  # few real layouts tie within 1 %
    job = TrainingJob(decoder=OLMOE, world_size=8, global_batch=256, length=4096)
    pins = LayoutRequest(tp=1, pp=1, ep=8, micro_batch=2, overlap="none", dispatcher="deepep")
    layout = FoldedLayout(dp=8, ep=8, micro_batch=2, dispatcher="deepep")
    fastest, other = (
        search_of(job).priced(replace(layout, recompute=one)) for one in ((), ("moe_act", "norm"))
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
