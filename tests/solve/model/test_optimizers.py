"""Bytes of gradients and states by optimizer, against counts of parameters by hand."""

from dataclasses import replace

import pytest

from benchmarks.public_runs.score import allocated_bytes
from moetune.app.files import bundled_profiles, load_profile_file
from moetune.domain.optimizers import OptimizerName
from moetune.domain.targets import find_target
from moetune.domain.training import FoldedLayout, Recompute, TrainingJob
from moetune.huggingface.registry import named_model
from moetune.solve.model.memory import MemoryModel, RankMemory
from moetune.solve.model.pipeline import DecoderStages

MOONLIGHT = TrainingJob(
    decoder=named_model("moonlight").decoder, world_size=8, global_batch=4, length=4096
)
LAYOUT = FoldedLayout(dp=4, tp=2, ep=8)
EXPERTS = 26 * 64 * 3 * 2048 * 1408 // 8
"""Of one rank: 26 blocks, 64 experts, three matrices."""
REST = 800e6
"""Of one rank: tables, attention, shared experts, the dense FFN and routers, by hand."""


def memory_of(optimizer: OptimizerName, layout: FoldedLayout = LAYOUT) -> RankMemory:
    job = replace(MOONLIGHT, optimizer=optimizer)
    return MemoryModel(
        job=job, stages=DecoderStages(job.decoder), target=find_target("bridge")
    ).peak(layout)


@pytest.mark.parametrize(
    ("optimizer", "gradient", "state"),
    [("adam", 4, 12), ("adam-bf16-grads", 2, 12), ("adam-bf16-moments", 2, 8),
     ("adam-remainders", 2, 10), ("adam-bf16", 2, 6)],
)  # fmt: skip
def test_each_parameter_takes_the_optimizers_bytes(
    optimizer: OptimizerName, gradient: int, state: int
) -> None:
    parts = memory_of(optimizer).parts
    assert parts["gradients"] == pytest.approx(gradient * (EXPERTS + REST), rel=0.01)
    assert parts["optimizer"] == pytest.approx(state * (EXPERTS + REST / 4), rel=0.01)


PUBLISHED: dict[tuple[Recompute, ...], float] = {
    (): 36.618, ("core_attn",): 36.614, ("mla_up_proj",): 35.902, ("mla_up_proj", "mlp"): 35.917,
    ("moe_act",): 35.941, ("norm", "moe_act"): 35.949,
}  # fmt: skip
"""GB of max_memory_allocated: Megatron-Bridge, skills/nemo-mbridge-perf-activation-recompute."""


def test_published_peaks_of_moonlight_are_within_a_sixteenth() -> None:
    for recompute, measured in PUBLISHED.items():
        layout = replace(LAYOUT, recompute=recompute)
        allocated = allocated_bytes(memory_of("adam-bf16-moments", layout)) / 1e9
        assert allocated == pytest.approx(measured, rel=1 / 16)


def test_recomputation_frees_no_more_than_the_step_needs() -> None:
    """The copy of the gradients' shard is as large as what is recomputed: published, and here."""
    few = replace(LAYOUT, recompute=("moe_act",))
    most = replace(LAYOUT, recompute=("norm", "moe_act"))
    first, second = (memory_of("adam-bf16-moments", layout) for layout in (few, most))
    assert allocated_bytes(first) == pytest.approx(allocated_bytes(second))
    assert first.parts["optimizer step"] > 0
    whole, less = (memory_of("adam-bf16", layout) for layout in (few, most))
    assert allocated_bytes(less) < allocated_bytes(whole)
    assert less.parts["optimizer step"] == 0


def test_published_savings_of_nano_and_its_verdicts() -> None:
    """Megatron-Bridge's study on 80 GB: what recomputation freed, and which runs had room."""
    decoder = named_model("nemotron-3-nano").decoder
    job = TrainingJob(
        decoder=decoder, world_size=16, global_batch=16, length=8192, optimizer="adam-bf16-grads"
    )
    model = MemoryModel(job=job, stages=DecoderStages(decoder), target=find_target("bridge"))
    usable = load_profile_file(bundled_profiles()["h100-x8"]).machine.plannable_bytes

    def peak(*recompute: Recompute) -> RankMemory:
        return model.peak(FoldedLayout(dp=16, ep=8, recompute=recompute))

    acts = peak().parts["activations"] - peak("moe_act").parts["activations"]
    assert acts / 1e9 == pytest.approx(4.194, rel=0.01)
    norms = peak("moe").parts["activations"] - peak("norm", "moe").parts["activations"]
    assert norms / 1e9 == pytest.approx(1.014, rel=0.01)
    assert allocated_bytes(peak("moe")) / 1e9 == pytest.approx(64.653, rel=0.02)
    for fitting in (("moe",), ("norm", "moe")):
        assert peak(*fitting).peak_bytes <= usable
    for failed in ((), ("core_attn",), ("moe_act",), ("norm", "moe_act")):
        assert peak(*failed).peak_bytes > usable


def test_tensor_ranks_have_whole_projections_to_latent_vectors() -> None:
    decoder, whole = MOONLIGHT.decoder, FoldedLayout(dp=8, ep=8)
    [rank] = DecoderStages(decoder).ranks(whole)
    full, half = (
        DecoderStages(decoder).parameters(layout, rank).dense for layout in (whole, LAYOUT)
    )
    latent = 27 * 2048 * (512 + 64)
    everywhere = latent + 26 * 64 * 2048 + 27 * (2 * 2048 + 512)
    assert half == pytest.approx(everywhere + (full - everywhere) / 2, rel=1e-3)
