"""Recorded layers that are priced at once: each as if it were priced by itself."""

from dataclasses import replace

import pytest

from moetune.domain.interference import CommSpeed, CompSpeed, Interference
from moetune.domain.profile import Profile
from moetune.domain.recorded_layers import RecordedLayer, RecordedLayers
from moetune.domain.routing import ExpertLoads
from moetune.domain.targets import find_target
from moetune.domain.training import Degrees, FoldedLayout, TrainingJob
from moetune.fit.costs import costs_of
from moetune.fit.slowed import Slowdown, slowed
from moetune.huggingface.registry import named_model
from moetune.solve.training.machine import DevicePrices
from moetune.solve.training.stages import DecoderStages
from moetune.solve.training.step import StepPrices
from moetune.workflows.files import bundled_profiles, load_profile_file

H100 = load_profile_file(bundled_profiles()["h100-x8"])
DISTURBED = Interference(comp=CompSpeed(comm=0.8), comm=CommSpeed(comp=0.7))
LAYOUTS = {
    "none": FoldedLayout(dp=64, ep=8),
    "chunks": FoldedLayout(dp=64, ep=16, overlap="chunks", degree=Degrees(forward=3, backward=2)),
    "recomputed": FoldedLayout(dp=64, ep=8, overlap="chunks", recompute=("moe",)),
}


def recorded_job(name: str) -> TrainingJob:
    """A job whose every layer of experts has loads of its own, two of them the same."""
    decoder = named_model(name).decoder
    num = sum(block.routed is not None for block in decoder.blocks)
    routed = decoder.layer
    layers = [
        RecordedLayer(
            loads=ExpertLoads(
                name="recorded",
                loads=tuple(
                    1.0 + (expert * 7 + layer * 3) % 11 for expert in range(routed.num_experts)
                ),
            ),
            spread=1.1, top_k=routed.top_k,
        )
        for layer in range(num)
    ]  # fmt: skip
    layers[1] = layers[0]
    routing = RecordedLayers(name="recorded", layers=tuple(layers))
    return TrainingJob(
        decoder=routing.told_apart(decoder), world_size=64, global_batch=256, length=4096,
        routing=routing,
    )  # fmt: skip


def prices_of(job: TrainingJob, profile: Profile, slowdown: Slowdown | None = None) -> StepPrices:
    costs = slowed(costs_of(profile, allow_modelled=True), slowdown)
    return StepPrices(
        job=job, device=DevicePrices(costs=costs, machine=profile.machine),
        stages=DecoderStages(job.decoder), target=find_target("moetune"),
    )  # fmt: skip


@pytest.mark.parametrize(
    "slowdown", [None, Slowdown(part="gemm rate", factor=1.5)], ids=["exact", "slowed"]
)
@pytest.mark.parametrize("interference", [Interference(), DISTURBED], ids=["alone", "disturbed"])
@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_each_layer_has_the_seconds_that_it_has_by_itself(
    layout: FoldedLayout, name: str, interference: Interference, slowdown: Slowdown | None
) -> None:
    profile, job = replace(H100, interference=interference), recorded_job(name)
    every = prices_of(job, profile, slowdown)
    degree = every.blocks.degree(layout)
    found = every.blocks.seconds(replace(layout, degree=degree))
    for kind, one in zip(job.decoder.kinds, found, strict=False):
        alone = replace(job, decoder=replace(job.decoder, blocks=(kind,), predictions=()))
        [own] = prices_of(alone, profile, slowdown).blocks.seconds(replace(layout, degree=degree))
        assert [one.forward, one.backward, one.hidden] == pytest.approx(
            [own.forward, own.backward, own.hidden]
        )
        assert one.parts == pytest.approx(own.parts)
    skews = {one.times.passes("experts").forward for one in found}
    assert len(skews) > 5
