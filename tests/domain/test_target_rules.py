"""What runtimes refuse of layouts and models, by version and by machine, and what runs instead."""

from dataclasses import replace
from typing import Any

import pytest

from moetune.domain.architecture import Block, Decoder
from moetune.domain.attention import GroupedQueryAttention
from moetune.domain.errors import InputError
from moetune.domain.experts import DenseFfn
from moetune.domain.megatron_models import recipe_of
from moetune.domain.recurrent import ShortConvolution
from moetune.domain.site import Site
from moetune.domain.target_rules import layout_rules, model_rules, target_rules
from moetune.domain.targets import TARGETS, find_target, planned_target
from moetune.domain.training import FoldedLayout, TrainingJob
from moetune.huggingface.registry import named_model

H100 = Site(
    vendor="nvidia", chip="h100", generation="hopper", capability=(9, 0), devices_per_node=8,
    nvlink_peers=8, num_nics=8, nic_bytes_per_second=5e10, host_memory_bytes=2**40,
)  # fmt: skip
GB200 = replace(H100, chip="gb200", capability=(10, 0), devices_per_node=4, nvlink_peers=72)
PCIE = replace(H100, chip="a100", capability=(8, 0), devices_per_node=4, nvlink_peers=0)
AMD = replace(H100, vendor="amd", chip="mi300x", generation="cdna3", capability=None,
              nvlink_peers=0)  # fmt: skip
QWEN, LLAMA = "qwen3-30b-a3b", "llama-3-8b"
EXCHANGING = {"dp": 8, "ep": 8}
GRAPHED = EXCHANGING | {"dispatcher": "hybrid_ep", "cuda_graphs": "full"}
SHARDED = {"dp": 64, "ep": 8, "zero": 3}


def refusals(
    target: str, model: str, sizes: dict[str, Any], site: Site | None = None, **job: Any
) -> str:
    """Return all that a runtime refuses of a layout, each with what runs instead."""
    layout = FoldedLayout(**sizes)
    given = {"world_size": layout.world_size, "global_batch": 1024, "length": 4096, **job}
    asked = TrainingJob(decoder=named_model(model).decoder, **given)
    rules = target_rules(layout, find_target(target), asked, site)
    return "; ".join(f"{broken.what} | {broken.hint}" for broken in rules)


@pytest.mark.parametrize(("target", "model", "sizes", "job", "words"), [
    ("megatron", QWEN, {"dp": 8, "overlap": "batch"}, {},
     "overlap batch with ep 1 … --overlap none"),
    ("megatron", QWEN, EXCHANGING | {"overlap": "batch", "pp": 2}, {},
     "no virtual stages … --vpp"),
    ("megatron@0.17", QWEN, EXCHANGING | {"overlap": "batch", "zero": 3}, {},
     "Megatron-FSDP … --zero 1"),
    ("megatron", QWEN, EXCHANGING | {"overlap": "batch", "recompute": ("full",)}, {},
     "overlap batch with recomputation of full … moe_act"),
    ("megatron", QWEN, EXCHANGING | {"overlap": "batch", "dispatcher": "all_gather"}, {},
     "overlap batch with all_gather … --dispatcher all_to_all"),
    ("megatron", QWEN, {"dp": 2, "pp": 2, "zero": 3}, {}, "ZeRO-3 with pp 2 … --pp 1"),
    ("megatron", QWEN, {"dp": 2, "cuda_graphs": "partial", "recompute": ("moe",)}, {},
     "partial CUDA graphs with recomputation of moe … --cuda-graphs none"),
    ("moetune", QWEN, {"dp": 2, "tp": 2}, {}, "tp 2 with dispatcher all_to_all … --tp 1"),
    ("moetune", QWEN, {"dp": 2, "tp": 2, "zero": 1}, {}, "ZeRO-1 with tp 2 … --zero 0"),
    ("moetune", QWEN, {"dp": 2, "cp": 2}, {}, "cp 2 … --cp 1"),
    ("moetune", QWEN, {"recompute": ("moe",)}, {}, "recomputation of moe … --recompute full"),
    ("moetune", QWEN, {"pp": 2, "schedule": "zero_bubble"}, {},
     "schedule zero_bubble … --schedule 1f1b or interleaved"),
    ("torchtitan", QWEN, {"dp": 2, "etp": 2}, {}, "etp 2 … --etp 1"),
    ("moetune", QWEN, {"dp": 2, "zero": 2}, {}, "ZeRO stage 2 … --zero 0 or 1 or 3"),
    ("moetune", QWEN, {"pp": 2, "stages": ("Etm", "tL")}, {},
     "multi-token prediction … --stages"),
    ("torchtitan", QWEN, {"dp": 8, "dispatcher": "all_gather"}, {},
     "dispatcher all_gather … deepep"),
    ("megatron", "glm-4.5-air", {"tp": 3}, {}, "tp 3 with 8 key-value heads"),
    ("megatron", "glm-4.5-air", {"tp": 3}, {}, "--tp 2 or 4"),
    ("megatron@0.17", "qwen3-next-80b-a3b", {"cp": 2}, {}, "cp 2 with gated delta nets"),
    ("megatron", "qwen3-next-80b-a3b", {"tp": 4, "cp": 8}, {}, "tp·cp 32 with 16 heads"),
    ("megatron@0.18", "deepseek-v3.2", {"cp": 2}, {}, "an indexer of keys"),
    ("megatron", "gpt-oss-20b", {"cp": 2, "tp": 8}, {}, "windows or sinks"),
    ("megatron", "nemotron-3-nano", {"tp": 16}, {}, "tp 16 with 8 Mamba groups"),
    ("megatron", "nemotron-3-nano", {"tp": 8, "cp": 16}, {}, "with 64 Mamba heads"),
    ("megatron", "nemotron-3-nano", {"cp": 3}, {}, "cp 3 with 8 Mamba groups a rank"),
    ("megatron", "nemotron-3-nano", {"pp": 2, "vpp": 2}, {},
     "virtual stages of a Mamba hybrid"),
    ("megatron", "nemotron-3-nano", EXCHANGING | {"overlap": "batch"}, {},
     "has no schedule plan"),
    ("megatron", "nemotron-3-nano", {"offload_activations": 0.5}, {}, "of a Mamba hybrid"),
    ("megatron", "nemotron-3-nano", {"pp": 5}, {}, "layers of a Mamba hybrid"),
    ("megatron@0.17", "deepseek-v3", EXCHANGING | {"overlap": "batch"}, {},
     "multi-token prediction and pp 1"),
    ("megatron", "minimax-m2", EXCHANGING | {"overlap": "batch"}, {},
     "with 3 steps of multi-token prediction"),
    ("megatron", QWEN, EXCHANGING | {"overlap": "batch", "zero": 3, "cuda_graphs": "partial"},
     {}, "partial CUDA graphs with overlap batch and Megatron-FSDP"),
    ("megatron", "glm-4.5-air", EXCHANGING | {"overlap": "batch", "cuda_graphs": "partial"}, {},
     "biases of attention"),
    ("megatron@0.17", QWEN, {"cuda_graphs": "full"}, {}, "no paged stash keeps"),
    ("megatron", QWEN, {"cuda_graphs": "full"}, {}, "experts with ep 1"),
    ("megatron", QWEN, EXCHANGING | {"cuda_graphs": "full"}, {},
     "full CUDA graphs of experts with all_to_all"),
    ("megatron", QWEN, GRAPHED | {"tp": 2, "etp": 2}, {}, "experts with etp 2"),
    ("megatron", QWEN, GRAPHED | {"recompute": ("moe",)}, {}, "recomputation of moe"),
    ("bridge", "gemma-4-26b-a4b", {"recompute": ("norm",)}, {}, "recomputation of norms"),
    ("bridge", "gemma-4-26b-a4b", {"cuda_graphs": "partial"}, {}, "CUDA graphs of Gemma 4"),
    ("megatron", "gpt-oss-20b", {"tp": 2, "etp": 2}, {}, "experts that add biases"),
    ("megatron", QWEN, {"dp": 24, "ep": 6, "dispatcher": "deepep"}, {}, "deepep with ep·etp 6"),
    ("megatron", QWEN, {"dp": 8, "tp": 3, "ep": 2, "etp": 3, "dispatcher": "deepep"}, {},
     "deepep with ep·etp 6"),
    ("torchtitan", QWEN, {"dp": 48, "ep": 24, "dispatcher": "deepep"}, {},
     "deepep with ep·etp 24"),
    ("torchtitan", QWEN, SHARDED | {"tp": 8}, {}, "tp 8 with 4 key heads"),
    ("torchtitan", "qwen3.5-35b-a3b", SHARDED | {"cp": 2}, {}, "cp 2 of qwen3_5"),
    ("torchtitan", "moonlight", SHARDED | {"cp": 2}, {}, "cp 2 of kimi_k2_7"),
    ("torchtitan", QWEN, SHARDED, {"length": 131_072}, "30B-A3B embeds 40960"),
    ("torchtitan", LLAMA, SHARDED | {"ep": 1, "cp": 4}, {"length": 4352}, "which 128·cp (512)"),
    ("torchtitan", LLAMA, SHARDED | {"ep": 1, "cp": 4, "tp": 4}, {"length": 4112},
     "which 2·cp·tp (32)"),
    ("torchtitan", QWEN, SHARDED | {"ep": 1, "dispatcher": "deepep"}, {}, "deepep with ep 1"),
    ("torchtitan", QWEN, SHARDED | {"ep": 1, "tp": 4}, {},
     "tp 4 with ep 1: it cuts the experts"),
    ("torchtitan", "gpt-oss-20b", SHARDED | {"dp": 512, "ep": 4}, {},
     "experts in 128 shards, which the width 2880"),
    ("torchtitan", "qwen3-0.6b", SHARDED | {"ep": 1, "pp": 2, "zero": 2}, {},
     "an embedding that is the head"),
    ("torchtitan", "qwen3-8b", SHARDED | {"ep": 1, "pp": 4, "zero": 2}, {"global_batch": 128},
     "2 micro-batches in 4"),
    ("torchtitan", QWEN, SHARDED | {"dispatcher": "deepep"}, {"dtype": "mxfp8"},
     "deepep with mxfp8"),
    ("torchtitan", "qwen3.5-35b-a3b", SHARDED | {"tp": 32}, {}, "delta nets of 16 key and"),
    ("transformers", QWEN, SHARDED | {"tp": 8}, {}, "tp 8 with 4 key heads"),
    ("transformers", "deepseek-v3", SHARDED | {"tp": 2}, {},
     "tensor plan of deepseek_v3 leaves attention whole"),
    ("transformers", QWEN, SHARDED | {"tp": 2, "ep": 1}, {},
     "its tensor plan cuts the experts"),
    ("transformers", "llama-4-scout", SHARDED, {}, "expert plan of llama4_text is empty"),
    ("transformers", "kimi-linear-48b-a3b", SHARDED, {},
     "convolutions of kimi_linear load in another order"),
    ("deepspeed", "olmoe", SHARDED, {}, "AutoEP has no preset for olmoe"),
    ("deepspeed", "deepseek-v3", SHARDED | {"tp": 2}, {},
     "AutoTP does not cut the attention of deepseek_v3"),
    ("deepspeed", QWEN, SHARDED | {"tp": 2, "ep": 1}, {}, "asks for autoep_size above 1"),
    ("deepspeed", QWEN, SHARDED | {"tp": 8}, {}, "tp 8 with 4 key heads"),
])  # fmt: skip
def test_what_cannot_run_is_named_with_what_can(
    target: str, model: str, sizes: dict[str, Any], job: dict[str, Any], words: str
) -> None:
    text = refusals(target, model, sizes, **job)
    assert all(part in text for part in words.split(" … ")), text


@pytest.mark.parametrize(("target", "model", "sizes"), [
    ("bridge@0.5", "gemma-4-26b-a4b", {"recompute": ("norm",)}),
    ("bridge", "gemma-4-26b-a4b", {"recompute": ("moe_act",)}),
    ("megatron", QWEN, {"tp": 8}),
    ("megatron", "qwen3-next-80b-a3b", {"tp": 2, "cp": 2}),
    ("megatron", "deepseek-v3.2", {"cp": 2}),
    ("megatron", "gpt-oss-20b", {"cp": 2, "tp": 2}),
    ("megatron", "nemotron-3-nano", {"pp": 4, "tp": 8}),
    ("megatron", "deepseek-v3", EXCHANGING | {"overlap": "batch", "zero": 3}),
    ("megatron", "llama-3-8b", {"dp": 8, "cuda_graphs": "full"}),
    ("megatron", QWEN, {"dp": 8, "cuda_graphs": "partial"}),
    ("megatron@0.16", "llama-3-8b", {"dp": 8, "cuda_graphs": "full"}),
    ("megatron", QWEN, GRAPHED | {"overlap": "batch"}),
    ("bridge", "deepseek-v3", {"dp": 16, "ep": 16, "dispatcher": "deepep"}),
    ("torchtitan", QWEN, SHARDED | {"tp": 4, "cp": 2}),
    ("torchtitan", "gpt-oss-20b", SHARDED | {"dp": 256, "ep": 32}),
    ("torchtitan", "deepseek-v3", SHARDED | {"pp": 8, "zero": 2}),
    ("transformers", QWEN, SHARDED | {"tp": 2, "ep": 4}),
    ("deepspeed", QWEN, SHARDED | {"tp": 2}),
])  # fmt: skip
def test_what_runs(target: str, model: str, sizes: dict[str, Any]) -> None:
    assert not refusals(target, model, sizes, H100)


@pytest.mark.parametrize(("site", "dispatcher", "ep", "word"), [
    (GB200, "deepep", 4, "deepep on gb200"),
    (GB200, "hybrid_ep", 64, ""),
    (PCIE, "deepep", 4, "deepep without NVLink"),
    (PCIE, "hybrid_ep", 4, "hybrid_ep without NVLink"),
    (AMD, "deepep", 8, "deepep without NVIDIA GPUs"),
    (replace(PCIE, nvlink_peers=4), "deepep", 16, "over nodes of 4 GPUs"),
    (replace(PCIE, nvlink_peers=4), "deepep", 8, "across nodes of 4 GPUs"),
    (replace(PCIE, nvlink_peers=4), "deepep", 4, ""),
    (PCIE, "deepep", 1, "deepep with ep 1"),
    (GB200, "hybrid_ep", 1, "hybrid_ep with ep 1"),
    (H100, "deepep", 64, ""),
    (None, "deepep", 64, ""),
])  # fmt: skip
def test_dispatchers_by_machine(site: Site | None, dispatcher: str, ep: int, word: str) -> None:
    sizes = {"dp": 64, "ep": ep, "dispatcher": dispatcher}
    text = refusals("bridge", QWEN, sizes, site)
    assert word in text
    assert bool(word) == bool(text)


def test_narrow_formats_are_refused_where_the_devices_have_none() -> None:
    text = refusals("megatron", QWEN, {"dp": 8}, PCIE, dtype="fp8")
    assert "the dtype fp8 on a100" in text
    assert not refusals("megatron", QWEN, {"dp": 8}, H100, dtype="fp8")


@pytest.mark.parametrize(("target", "model", "word"), [
    ("megatron", "llama-4-scout", "do not describe the family llama4_text"),
    ("megatron", "deepseek-v4-flash", "the family deepseek_v4"),
    ("megatron@0.16", "gpt-oss-20b", "has arguments from core 0.19 on"),
    ("megatron@0.16", "nemotron-3-super", "multi-token prediction of a hybrid"),
    ("bridge@0.3", "nemotron-3-super", "multi-token prediction of a hybrid"),
    ("bridge", "mixtral-8x7b", "no bridge of the family mixtral"),
    ("bridge@0.3", "qwen3-vl-30b-a3b", "without its vision, which its bridge makes"),
    ("bridge@0.5", "nemotron-3-nano-omni", "without its audio and vision"),
    ("bridge@0.4", "deepseek-v4-flash", "deepseek_v4 has a bridge from 0.5 on"),
    ("megatron", "gpt-oss-20b", ""),
    ("megatron", "deepseek-v3", ""),
    ("megatron", "qwen3-next-80b-a3b", ""),
    ("megatron", "nemotron-3-nano", ""),
    ("bridge@0.5", "deepseek-v4-flash", ""),
    ("bridge@0.5", "qwen3.5-27b", ""),
    ("bridge@0.5", "ling-mini-2.0", ""),
    ("bridge@0.5", "ling-lite-1.5", "no bridge of the family bailing_moe"),
    ("bridge@0.3", "kimi-k2.5", ""),
    ("torchtitan", "deepseek-v3", ""),
    ("torchtitan", "mixtral-8x7b", "no recipe of these sizes"),
    ("transformers", "kimi-k2", "has no class for kimi_k2"),
    ("deepspeed", "kimi-k2", "has no class for kimi_k2"),
    ("transformers", "qwen3-vl-30b-a3b", "AutoModelForCausalLM has no class for it"),
    ("transformers", "kimi-k3", "AutoModelForCausalLM has no class for it"),
    ("transformers", "nemotron-3-nano-omni", "AutoModelForCausalLM has no class for it"),
    *((target, QWEN, "") for target in ("torchtitan", "transformers", "deepspeed")),
])  # fmt: skip
def test_models_by_version(target: str, model: str, word: str) -> None:
    rules = [*model_rules(named_model(model).decoder, find_target(target))]
    assert word in "".join(broken.what for broken in rules)
    assert bool(word) == bool(rules)
    assert all(broken.hint for broken in rules)


def changed(decoder: Decoder, block: Block) -> Decoder:
    """Return a decoder whose first block is another one."""
    return replace(decoder, blocks=(block, *decoder.blocks[1:]))


def test_blocks_that_no_argument_says_are_named() -> None:
    decoder, target = named_model("qwen3-30b-a3b").decoder, find_target("megatron")
    first = decoder.blocks[0]
    attention = first.parts[0]
    experts = first.routed
    assert isinstance(attention, GroupedQueryAttention)
    assert experts is not None
    odd = {
        "blocks of 4 residual streams": replace(first, streams=4),
        "experts that return their input":
            replace(first, parts=(attention, replace(experts, num_zero_experts=8))),
        "values of another width":
            replace(first, parts=(replace(attention, v_head_dim=64), experts)),
        "attention, chunks of 64": replace(first, parts=(replace(attention, chunk=64), experts)),
        "a block of convolution":
            replace(first, parts=(ShortConvolution(d_model=2048, kernel=3, biases=0), experts)),
        "experts that differ": replace(first, parts=(attention, replace(experts, d_hidden=64))),
        "attention whose sizes differ":
            replace(first, parts=(replace(attention, num_heads=16), experts)),
    }  # fmt: skip
    for word, block in odd.items():
        [broken] = model_rules(changed(decoder, block), target)
        assert word in broken.what
    dense = named_model("llama-3-8b").decoder
    ffn = dense.blocks[0].parts[1]
    assert isinstance(ffn, DenseFfn)
    other = replace(dense.blocks[0], parts=(dense.blocks[0].parts[0], replace(ffn, d_hidden=64)))
    [broken] = model_rules(changed(dense, other), target)
    assert "dense FFNs that differ" in broken.what


def test_graphs_of_whole_steps_need_fused_experts() -> None:
    decoder, target = named_model("qwen3-30b-a3b").decoder, find_target("megatron")
    experts = decoder.blocks[0].routed
    assert experts is not None
    block = replace(
        decoder.blocks[0],
        parts=(decoder.blocks[0].parts[0], replace(experts, is_gated=False, function="gelu")),
    )
    job = TrainingJob(
        decoder=replace(decoder, blocks=(block,) * 4), world_size=8, global_batch=8, length=128
    )
    layout = FoldedLayout(dp=8, ep=8, dispatcher="hybrid_ep", cuda_graphs="full")
    [broken] = target_rules(layout, target, job)
    assert "full CUDA graphs of experts with gelu" in broken.what


def test_recipes_are_those_of_a_version() -> None:
    flash, coder = named_model("deepseek-v4-flash").decoder, named_model("mixtral-8x7b").decoder
    assert recipe_of(flash, find_target("bridge@0.4")) is None
    recipe = recipe_of(flash, find_target("bridge@0.5"))
    assert recipe is not None
    assert (recipe.package, recipe.function) == ("deepseek", "deepseek_v4_flash_pretrain_config")
    assert recipe_of(coder, find_target("bridge")) is None


@pytest.mark.parametrize(("spec", "what", "hint"), [
    ("megatron@0.2", "version '0.2' of megatron is unknown", "megatron@0.16, megatron@0.17"),
    ("moetune@", "version '' of moetune is unknown", ""),
    ("pytorch", "target 'pytorch' is unknown", "megatron"),
])  # fmt: skip
def test_an_unknown_runtime_is_refused_with_those_that_are(spec: str, what: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        find_target(spec)
    assert what in caught.value.what
    assert hint in caught.value.hint


def test_versions_have_names_and_old_plans_the_first() -> None:
    target = find_target("megatron@0.17")
    assert (target.number, target.release, target.spec) == ("0.17.1", "0.17", "megatron@0.17")
    assert find_target("megatron@0.17.1") is target
    assert planned_target("megatron", "").number == "0.16.1"
    assert planned_target("bridge", "0.5.1").core == (0, 18)
    assert find_target("moetune").spec == "moetune"
    assert "on PyPI for Python 3.12" in find_target("bridge").source


@pytest.mark.parametrize("target", TARGETS)
def test_plain_data_parallelism_runs_everywhere(target: str) -> None:
    facts = find_target(target)
    layout = FoldedLayout(dp=8, zero=facts.zero[0], dispatcher=facts.dispatchers[0])
    assert not list(layout_rules(layout, facts))


def test_experts_that_tensor_parallelism_divides() -> None:
    dividing = [target for target in TARGETS if find_target(target).tp_divides_ep]
    for target in dividing:
        assert "ep 3 with tp 2" in refusals(target, QWEN, {"dp": 3, "tp": 2, "ep": 3})
        gathered = {"dp": 4, "tp": 2, "ep": 4, "dispatcher": "all_gather"}
        assert "all_gather with ep 4 and tp 2" in refusals(target, QWEN, gathered)
    assert dividing


@pytest.mark.parametrize(("target", "sizes", "words"), [
    ("moetune", {"dp": 8}, "the dtype fp8 … the optimizer adam-bf16-moments"),
    ("megatron", {"dp": 8, "zero": 0},
     "adam-bf16-moments with ZeRO stage 0 … adam-bf16-moments with the dtype fp8"),
])  # fmt: skip
def test_dtypes_and_optimizers_are_refused(target: str, sizes: dict[str, Any], words: str) -> None:
    text = refusals(target, "olmoe", sizes, dtype="fp8", optimizer="adam-bf16-moments")
    assert all(part in text for part in words.split(" … "))


def test_chunks_need_ranks_that_exchange_tokens() -> None:
    runtime = find_target("moetune")
    exchanging = FoldedLayout(dp=2, ep=2, overlap="chunks")
    assert not [*layout_rules(exchanging, runtime)]
    [broken] = layout_rules(replace(exchanging, ep=1), runtime)
    assert "overlap chunks with ep 1" in broken.what
