"""What trains: counts of real classes, operations of real models, bytes by hand, public runs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.domain.errors import InputError
from moetune.domain.packing import Packing, packing_of, packing_of_mean
from moetune.domain.records import Calibration
from moetune.domain.target_rules import target_rules
from moetune.domain.targets import Target, find_target
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.domain.tuning import MODEL_PARTS, Tuning, read_tuning
from moetune.domain.units import format_train_tokens
from moetune.export.peft import modules_of, parameters_of
from moetune.export.planned import Planned
from moetune.fit.costs import costs_of
from moetune.huggingface.reader import language_model, read_decoder
from moetune.huggingface.registry import named_model
from moetune.solve.model.memory import MemoryModel
from moetune.solve.model.muon import Orthogonal, newton_schulz_seconds
from moetune.solve.model.pipeline import DecoderStages
from moetune.solve.model.profiled import device_prices
from moetune.solve.model.step import StepPrices
from moetune.solve.model.trained import flops_per_token, trained_of

ALONE = FoldedLayout(zero=0)


def job_of(name: str, train: str | None = None, freeze: str | None = None, **more: Any) -> Any:
    tuning = read_tuning(train, freeze, experts=more.pop("experts", "each"))
    sizes = {"world_size": 1, "global_batch": 1, "length": 4096, **more}
    return TrainingJob(decoder=named_model(name).decoder, tuning=tuning, **sizes)


def prices_of(job: TrainingJob, target: Target, profile: str = "h100-x8") -> StepPrices:
    machine = load_profile_file(bundled_profiles()[profile])
    device = device_prices(machine, costs_of(machine, allow_modelled=True))
    return StepPrices(job=job, device=device, stages=DecoderStages(job.decoder), target=target)


def made(config: Mapping[str, Any], device: str) -> Any:
    plain = {key: value for key, value in config.items() if key != "architectures"}
    built = CONFIG_MAPPING[plain.pop("model_type")](**plain)
    built._attn_implementation = built._experts_implementation = "eager"
    with torch.device(device):
        return AutoModelForCausalLM.from_config(built)


@pytest.mark.parametrize(
    "name", ["qwen3-30b-a3b", "deepseek-v2-lite", "gpt-oss-20b", "mixtral-8x7b", "glm-4.7-flash"]
)
def test_adapters_have_the_parameters_of_the_classes_matrices(name: str) -> None:
    """PEFT 0.21 has r·(inputs + outputs) of each, and as many for each expert of fused ones."""
    model = made(language_model(named_model(name).config)[0], "meta")
    target = find_target("transformers")
    for train in ("lora:rank=16,targets=attention", "lora:rank=4,targets=experts"):
        job = job_of(name, train)
        planned = Planned(plan_id="", job=job, layout=ALONE, target=target)
        adapters = job.tuning.adapters
        modules = {*modules_of(planned)}
        fused = () if adapters.targets == "attention" else (*parameters_of(planned),)
        count = sum(
            adapters.rank
            * sum(weights.shape[-2:])
            * (weights.shape[0] if weights.dim() == 3 else 1)
            for path, weights in model.named_parameters()
            if path.endswith(fused) or (path.endswith(".weight") and path.split(".")[-2] in modules)
        )
        trained = trained_of(job, target)
        assert trained is not None
        assert trained.parameters == count


@pytest.mark.parametrize("part", MODEL_PARTS)
def test_frozen_parts_leave_the_parameters_of_the_rest(part: str) -> None:
    job = job_of("deepseek-v2-lite", freeze=part)
    amounts = job.decoder.parameters
    frozen = getattr(amounts, {"experts": "routed", "shared_experts": "shared"}.get(part, part))
    trained = trained_of(job, find_target("bridge"))
    assert trained is not None
    assert trained.parameters == amounts.total - frozen
    parts = memory_of(job, FoldedLayout(), "bridge")
    assert parts["optimizer"] == pytest.approx(12 * (amounts.total - frozen), rel=1e-3)
    assert parts["parameters"] == pytest.approx(2 * amounts.total)


def memory_of(job: TrainingJob, layout: FoldedLayout, target: str) -> dict[str, float]:
    model = MemoryModel(job=job, stages=DecoderStages(job.decoder), target=find_target(target))
    return dict(model.peak(layout).parts)


def test_states_are_of_adapters_and_weights_below_of_their_format() -> None:
    """Megatron's Adam: 2 + 4 + 12 bytes; bitsandbytes' NF4: 4 bits, 8 for 64, 32 for 64·256."""
    job = job_of("qwen3-30b-a3b", "lora:rank=8")
    total, adapters = job.decoder.parameters, trained_of(job, find_target("bridge"))
    assert adapters is not None
    parts = memory_of(job, FoldedLayout(), "bridge")
    assert parts["parameters"] == pytest.approx(2 * (total.total + adapters.parameters))
    assert parts["gradients"] == pytest.approx(4 * adapters.parameters)
    assert parts["optimizer"] == pytest.approx(12 * adapters.parameters)
    narrow = job_of("qwen3-30b-a3b", "qlora:rank=8,targets=attention")
    quantized, few = total.attention + total.routed, trained_of(narrow, find_target("transformers"))
    assert few is not None
    parts = memory_of(narrow, ALONE, "transformers")
    base = 4.126953125 / 8 * quantized + 2 * (total.total - quantized)
    assert parts["parameters"] == pytest.approx(base + 4 * few.parameters, rel=1e-6)


TINY: dict[str, Any] = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": 128,
    "intermediate_size": 96, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": True, "tie_word_embeddings": False,
}  # fmt: skip


class Adapted(torch.nn.Module):
    def __init__(self, base: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = torch.nn.Parameter(torch.randn(rank, base.in_features))
        self.b = torch.nn.Parameter(torch.randn(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T  # type: ignore[no-any-return]


def test_needed_operations_are_those_of_a_real_model_with_frozen_weights() -> None:
    model, rank, tokens = made(TINY, "cpu"), 4, 32
    model.requires_grad_(False)  # noqa: FBT003 - torch's own
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name), rank))
    embedded = model.model.embed_tokens(torch.arange(tokens)[None]).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=embedded).logits.sum().backward()
    decoder = read_decoder(TINY, name="tiny", where="tiny")
    job = TrainingJob(
        decoder=decoder, world_size=1, global_batch=1, length=tokens,
        tuning=read_tuning(f"lora:rank={rank},targets=attention", None, experts="each"),
    )  # fmt: skip
    masked = 2 * 3 * 2 * 4 * (16 + 16) * tokens / 2  # the half of a mask that eager attention has
    routers = 2 * 2 * 2 * 64 * 8  # which are not counted: forward, and gradients of the input
    wanted = tokens * (flops_per_token(job, find_target("transformers")) + masked + routers)
    assert counter.get_total_flops() == pytest.approx(wanted, rel=1e-6)


def test_frozen_weights_have_no_gradients_and_adapters_few() -> None:
    target, layout = find_target("bridge"), FoldedLayout(dp=8, ep=8)
    priced = [
        prices_of(job_of("qwen3-30b-a3b", train, world_size=8, global_batch=8), target)
        for train in (None, "lora:rank=1,targets=attention", "lora:rank=16")
    ]
    full, frozen, adapted = (
        prices.blocks.seconds(layout)[0].times.passes("experts") for prices in priced
    )
    assert frozen == full.frozen
    assert frozen.forward < adapted.forward < 3 * frozen.forward
    assert 0 < adapted.grad_weight < 0.5 * full.grad_weight
    steps = [prices.step(layout) for prices in priced]
    assert steps[1].seconds < min(steps[0].seconds, steps[2].seconds)
    assert steps[1].parts["optimizer"] < 0.01 * steps[0].parts["optimizer"]


@pytest.mark.parametrize(
    ("profile", "layout", "tokens_per_second", "tflops"),
    [("h100-x8", {"tp": 2, "pp": 4}, 2643, 735), ("gb300-nvl72", {"dp": 4, "pp": 2}, 7481, 2086)],
)
def test_public_runs_of_adapters(
    profile: str, layout: dict[str, Any], tokens_per_second: float, tflops: float
) -> None:
    """Megatron-Bridge@067f987, docs/performance-summary-archive.md, LoRA of LLAMA3_70B, FP8."""
    job = job_of("llama-3-70b", "lora:rank=16,targets=attention", world_size=8, global_batch=32,
                 dtype="fp8", packing=packing_of_mean(200, 4096))  # fmt: skip
    target = find_target("bridge")
    flops = flops_per_token(job, target)
    assert flops == pytest.approx(tflops * 1e12 / tokens_per_second, rel=0.01)
    step = prices_of(job, target, profile).step(FoldedLayout(vpp=20, **layout))
    assert 0.75 < step.seconds * tokens_per_second * 8 / job.tokens < 1.33


def test_packed_documents_are_attended_alone() -> None:
    lengths = [100, 900, 2500, 4096, 9000, 24, 700]
    cut = [min(size, 4096) for size in lengths]
    packing = packing_of(lengths, 4096, "lengths.txt")
    assert packing.attended == pytest.approx(sum(size**2 for size in cut) / sum(cut))
    assert packing.useful == pytest.approx(sum(cut) / (4 * 4096))  # two of one, and two of others
    job = job_of("qwen3-30b-a3b")
    flops = job.decoder.flops_per_token
    apart = sum(size * flops(size).total for size in cut)
    packed = flops_per_token(replace(job, packing=packing), find_target("bridge")) * sum(cut)
    assert packed == pytest.approx(apart, rel=1e-3)
    with pytest.raises(InputError, match="longer than a sequence"):
        packing_of_mean(5000, 4096)
    short, whole = (
        prices_of(row, find_target("bridge")).step(FoldedLayout()).parts["core_attn"]
        for row in (replace(job, packing=packing_of_mean(512, 4096)), job)
    )
    assert 1 / 8 < short / whole < 0.6  # an eighth of the pairs, in kernels that reach less


def orthogonal(momentum: torch.Tensor, steps: int = 5) -> Any:
    x = momentum if momentum.shape[0] <= momentum.shape[1] else momentum.T
    x = x / x.norm()
    for _ in range(steps):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x if momentum.shape[0] <= momentum.shape[1] else x.T


class Counting:
    def gemm(self, _: str, *, rows: float, d_in: int, d_out: int) -> float:
        return 2 * rows * d_in * d_out


@pytest.mark.parametrize("sides", [(64, 256), (96, 32), (48, 48)])
def test_muon_multiplies_as_newton_and_schulz_do(sides: tuple[int, int]) -> None:
    torch.manual_seed(0)
    with FlopCounterMode(display=False) as counter:
        result = orthogonal(torch.randn(sides))
    assert (torch.linalg.svdvals(result) - 1).abs().median() < 0.4
    priced = newton_schulz_seconds(Counting(), Orthogonal(1, *sides))  # type: ignore[arg-type]
    assert priced == counter.get_total_flops()


def test_muon_keeps_a_moment_of_matrices_and_adams_two_of_the_rest() -> None:
    job = job_of("qwen3-30b-a3b", optimizer="muon")
    amounts = job.decoder.parameters
    rest = amounts.embedding + amounts.head + amounts.norms + 48 * 2 * 128  # norms of heads
    parts = memory_of(job, FoldedLayout(), "megatron")
    assert parts["optimizer"] == pytest.approx(8 * amounts.total + 4 * rest, rel=1e-6)
    split = memory_of(replace(job, world_size=8), FoldedLayout(dp=8, ep=4), "megatron")
    assert split["optimizer"] == pytest.approx(
        8 * (amounts.routed / 8 + (amounts.total - amounts.routed) / 8) + 4 * rest / 8, rel=1e-3
    )


REFUSED: tuple[tuple[str, str | None, str | None, dict[str, Any], str], ...] = (
    ("moetune", "lora:rank=8", None, {}, "cannot run adapters"),
    ("torchtitan", None, "router", {"zero": 2}, "frozen parts (--freeze router)"),
    ("deepspeed", "lora:rank=8,targets=attention", None, {}, "cannot run adapters"),
    ("bridge@0.3", "lora:rank=8,experts=each", None, {}, "adapters of experts that are each"),
    ("bridge", "qlora:rank=8", None, {}, "a base in nf4"),
    ("bridge", "lora:rank=8", None, {"dp": 2, "tp": 2, "etp": 2}, "with etp 2"),
    ("bridge", "lora:rank=8", None, {"zero": 3}, "ZeRO stage 3"),
    ("bridge", "lora:rank=8", None, {"ep": 2, "dp": 2, "overlap": "batch"}, "overlap batch with"),
    ("transformers", "lora:rank=8", None, {"dp": 2, "zero": 3}, "peft#3080"),
    ("transformers", "lora:rank=8", None, {"dp": 2, "ep": 2, "zero": 0}, "ep 2 with adapters"),
    ("transformers", "qlora:rank=8,targets=attention", None, {"dp": 2, "zero": 3}, "nf4 with FSDP"),
)


@pytest.mark.parametrize(("target", "train", "freeze", "layout", "what"), REFUSED)
def test_what_a_runtime_cannot_train_is_refused_by_name(
    target: str, train: str | None, freeze: str | None, layout: dict[str, Any], what: str
) -> None:
    job = job_of("qwen3-30b-a3b", train, freeze)
    broken = [*target_rules(FoldedLayout(**layout), find_target(target), job)]
    assert any(what in rule.what and rule.hint for rule in broken), broken


@pytest.mark.parametrize(
    ("train", "freeze"),
    [("lora", None), ("lora:rank=0", None), ("lora:rank=8,target=all", None), ("dora:rank=8", None),
     ("lora:rank=8,targets=mlp", None), ("lora:rank=8", "router"), (None, "routers"),
     (None, "embedding,attention,dense,router,experts,shared_experts,norms")],
)  # fmt: skip
def test_texts_of_what_trains_are_refused(train: str | None, freeze: str | None) -> None:
    with pytest.raises(InputError):
        read_tuning(train, freeze, experts="each")


def test_what_trains_packs_and_calibrates_is_possible() -> None:
    with pytest.raises(InputError, match="trains by adapters alone"):
        Tuning(base="nf4")
    with pytest.raises(InputError, match="cannot be packed"):
        Packing(mean=8.0, attended=4.0)
    for lengths in ((), (4, 0)):
        with pytest.raises(InputError, match="a length is below 1"):
            packing_of(lengths, 8, "lengths.txt")
    with pytest.raises(InputError, match="in order"):
        Calibration(factor=1.0, low_factor=1.2, high_factor=1.5, num_runs=1)
    assert format_train_tokens(12_345) == "12,345"
