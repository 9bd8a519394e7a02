"""The questions whose answers are frozen: plans, and what is asked of each of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

LAB = str(Path(__file__).with_name("lab.toml"))
"""A profile measured once on two ranks of a laptop-sized machine, samples and all."""

_BERT = ("--model", "bert-l", "--profile", "rtx2080ti-x64")
_A100 = ("--model", "bert-l", "--world-size", "4", "--profile", "a100-x4")
_XL = ("--model", "gpt-xl", "--profile", "rtx2080ti-x64", "--dtype", "float16")
_TOP2 = (
    "--d-model", "1024", "--d-hidden", "8192", "--num-experts", "64", "--top-k", "2",
    "--tokens", "4096", "--dtype", "float16", "--profile", "rtx2080ti-x64",
)  # fmt: skip
_LAB = (
    "--d-model", "256", "--d-hidden", "1024", "--num-experts", "4", "--tokens", "1k",
    "--profile", LAB,
)  # fmt: skip
_TENSOR = (*_LAB, "--expert-parallel", "tensor", "--world-size", "2", "--allow-modelled")
_SMALL = ("--model", "ppmoe-6.7b", "--world-size", "32", "--profile", "v100-x256")
_LARGE = ("--model", "ppmoe-143b", "--world-size", "128", "--profile", "v100-x256")
_GATHERED = ("--dispatcher", "all_gather", "--ep")
_SIZES = (
    "--d-model", "1024", "--d-hidden", "4096", "--num-experts", "32", "--num-layers", "6",
    "--num-heads", "16", "--seq", "1024", "--vocab", "50k", "--global-batch", "128",
    "--world-size", "16", "--profile", "v100-x256",
)  # fmt: skip
_STEP = ("--global-batch", "128", "--seq", "4k")
_QWEN = ("--model", "qwen3-30b-a3b", "--world-size", "16", "--profile", "h100-x8", *_STEP)
_DEEP = ("--model", "deepseek-v2-lite", "--world-size", "8", "--profile", "h100-x8", *_STEP)
_LOADS = ("--routing", str(Path(__file__).with_name("loads.json")))
_UNEVEN = (*_TOP2, "--world-size", "8", "--allow-modelled", *_LOADS)
_NATURAL = ("--routing", "natural")
_MIX = ("--model", "mixtral-8x7b", "--world-size", "32", *_STEP)
_SMALL_QWEN = ("--model", "qwen3-30b-a3b", "--world-size", "32", *_STEP)
_PINNED = {
    "ring": (
        *_MIX, "--profile", "h100-x8", "--target", "megatron", "--cp", "16", "--pp", "2", "--ep",
        "8", "--micro-batch", "1", "--recompute", "moe_act",
    ),
    "narrow": (
        *_SMALL_QWEN, "--profile", "b200-x8", "--target", "bridge", "--dtype", "mxfp8", "--tp",
        "4", "--pp", "1", "--ep", "8", "--micro-batch", "1",
    ),
    "graphs": (
        *_MIX, "--profile", "h100-x8", "--target", "megatron", "--tp", "2", "--pp", "2", "--vpp",
        "2", "--ep", "8", "--zero", "1", "--micro-batch", "1", "--recompute", "none",
        "--cuda-graphs", "partial",
    ),
    "batch": (
        *_MIX, "--profile", "h100-x8", "--target", "megatron", "--pp", "4", "--vpp", "2", "--ep",
        "8", "--micro-batch", "1", "--overlap", "batch", "--recompute", "moe_act,norm",
    ),
    "repeated": (
        *_MIX, "--profile", "h200-x8", "--target", "megatron", "--tp", "4", "--pp", "2", "--ep",
        "4", "--micro-batch", "2", "--recompute", "full",
    ),
    "selective": (
        *_MIX, "--profile", "h100-x8", "--target", "megatron", "--tp", "2", "--pp", "4", "--ep",
        "8", "--micro-batch", "1", "--recompute", "core_attn,moe", *_NATURAL,
    ),
    "activations": (
        *_SMALL_QWEN, "--profile", "h100-x8", "--target", "megatron", "--tp", "2", "--pp", "1",
        "--ep", "8", "--micro-batch", "1", "--offload-activations", "0.5",
    ),
    "shared-experts": (
        *_MIX, "--profile", "h200-x8", "--target", "megatron", "--tp", "2", "--pp", "2", "--etp",
        "2", "--ep", "8", "--optimizer", "adam-bf16-grads",
    ),
    "two-halves": (
        *_SMALL_QWEN, "--profile", "h100-x8", "--target", "torchtitan", "--pp", "4", "--ep", "8",
        "--schedule", "zero_bubble_v", "--recompute", "full",
    ),
    "zero-bubble": (
        *_SMALL_QWEN, "--profile", "b200-x8", "--target", "torchtitan", "--pp", "4", "--ep", "8",
        "--schedule", "zero_bubble", "--micro-batch", "1", *_NATURAL,
    ),
    "sharded": (
        *_SMALL_QWEN, "--profile", "h200-x8", "--target", "torchtitan", "--cp", "2", "--ep", "8",
        "--zero", "3", "--tp", "2",
    ),
    "in-chunks": (
        *_MIX, "--profile", "h100-x8", "--target", "moetune", "--pp", "2", "--ep", "8",
        "--overlap", "chunks", "--micro-batch", "1", *_NATURAL,
    ),
    "deepspeed": (
        *_MIX, "--profile", "a100-x8", "--target", "deepspeed", "--ep", "8", "--zero", "2",
        "--micro-batch", "1",
    ),
}  # fmt: skip
_DENSE = ("--model", "gpt-2.7b", "--world-size", "1", "--profile", "a100-x4")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan, and the questions that are asked about it.

    Args:
        plan: arguments of `moetune plan`.
        questions: arguments of other commands, by name; the plan's file is their argument.
    """

    plan: tuple[str, ...]
    questions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


EXPLAIN: Mapping[str, tuple[str, ...]] = {"explain": ("explain",)}
TRACE = {"trace": ("trace",)}
BOTH = {**EXPLAIN, **TRACE}

CASES = {
    "bert-l": Case(
        plan=_BERT,
        questions={
            **BOTH,
            "tokens": ("whatif", "--tokens", "32k"),
            "ranks": ("whatif", "--world-size", "16"),
            "link": ("whatif", "--speed", "communication=2", "--speed", "computation=1.5"),
            "memory": ("whatif", "--memory-limit", "4GiB"),
            "pinned": ("whatif", "--constraint", "strategy=S4", "--constraint", "max-degree=8"),
        },
    ),
    "bert-l-x16": Case(plan=("--model", "bert-l", "--profile", "rtx2080ti-x16"), questions=BOTH),
    "gpt-s-x32": Case(plan=("--model", "gpt-s", "--profile", "rtx2080ti-x32"), questions=EXPLAIN),
    "gpt-xl": Case(plan=(*_XL, "--tokens", "16k"), questions=BOTH),
    "gpt-xl-memory": Case(
        plan=(*_XL, "--tokens", "16k", "--memory-limit", "2500MiB"), questions=BOTH
    ),
    "gpt-xl-taken": Case(plan=(*_XL, "--memory-taken", "7GiB"), questions=EXPLAIN),
    "tm-1": Case(plan=("--model", "tm-1", "--profile", "rtx2080ti-x64"), questions=BOTH),
    "rm-2": Case(plan=("--model", "rm-2", "--profile", "rtx2080ti-x16"), questions=EXPLAIN),
    "top2": Case(plan=_TOP2, questions=EXPLAIN),
    "top2-interleaved": Case(plan=(*_TOP2, "--order", "interleaved"), questions=BOTH),
    "top2-swiglu": Case(plan=(*_TOP2, "--activation", "swiglu"), questions=EXPLAIN),
    "degrees": Case(plan=(*_BERT, "--forward-degree", "5"), questions=BOTH),
    "max-degree": Case(
        plan=(*_BERT, "--max-degree", "3", "--min-chunk-tokens", "900"), questions=EXPLAIN
    ),
    "strategy-none": Case(plan=(*_BERT, "--strategy", "none"), questions=EXPLAIN),
    "strategy-s1": Case(plan=(*_A100, "--strategy", "S1"), questions=BOTH),
    "strategy-s2": Case(plan=(*_A100, "--strategy", "S2"), questions=BOTH),
    "strategy-s3": Case(plan=(*_A100, "--strategy", "S3"), questions=BOTH),
    "strategy-s4": Case(
        plan=(*_BERT, "--strategy", "S4", "--order", "interleaved"), questions=BOTH
    ),
    "modelled": Case(plan=(*_BERT, "--world-size", "8", "--allow-modelled"), questions=EXPLAIN),
    "lab": Case(
        plan=_LAB,
        questions={
            **BOTH,
            "tokens": ("whatif", "--tokens", "4k"),
            "link": ("whatif", "--speed", "communication=0.2"),
        },
    ),
    "lab-s4": Case(plan=(*_LAB, "--strategy", "S4"), questions=BOTH),
    "lab-degrees": Case(plan=(*_LAB, "--forward-degree", "4", "--strategy", "S1"), questions=BOTH),
    "lab-one-rank": Case(plan=(*_LAB, "--world-size", "1"), questions=EXPLAIN),
    "lab-tensor": Case(plan=_TENSOR, questions=BOTH),
    "model": Case(plan=_SMALL, questions={**BOTH, "ranks": ("whatif", "--world-size", "16")}),
    "model-pinned": Case(plan=(*_SMALL, "--tp", "4", "--pp", "2", *_GATHERED, "4"), questions=BOTH),
    "model-a2a": Case(
        plan=(*_SMALL, "--dispatcher", "all_to_all", "--micro-batch", "1"), questions=EXPLAIN
    ),
    "model-tensor": Case(
        plan=(*_SMALL, "--tp", "8", "--pp", "4", *_GATHERED, "8", "--zero", "0"), questions=EXPLAIN
    ),
    "model-sizes": Case(plan=(*_SIZES, "--moe-every", "3"), questions=BOTH),
    "model-143b": Case(plan=_LARGE, questions=EXPLAIN),
    **{
        f"qwen3-{target}": Case(plan=(*_QWEN, "--target", target), questions=EXPLAIN)
        for target in ("moetune", "megatron", "bridge", "torchtitan", "transformers", "deepspeed")
    },
    **{
        f"qwen3-{name}": Case(plan=(*_QWEN, "--target", target, *words), questions=BOTH)
        for name, target, words in (
            ("lora", "bridge", ("--train", "lora:rank=16", "--seq-lengths", "700")),
            ("qlora", "transformers", ("--train", "qlora:rank=16,targets=attention")),
            ("frozen", "transformers", ("--freeze", "router,experts")),
            ("muon", "megatron", ("--optimizer", "muon", "--tp", "2", "--zero", "1")),
        )
    },
    **{
        f"deepseek-{name}": Case(
            plan=(*_DEEP, "--target", target, "--memory-limit", limit), questions=EXPLAIN
        )
        for name, target, limit in (
            ("moetune-40", "moetune", "40GiB"),
            ("megatron-32", "megatron", "32GiB"),
            ("bridge-60", "bridge", "60GiB"),
            ("torchtitan-48", "torchtitan", "48GiB"),
        )
    },
    "mixtral": Case(
        plan=("--model", "mixtral-8x7b", "--world-size", "32", "--profile", "a100-x8", *_STEP),
        questions={
            **BOTH,
            "ranks": ("whatif", "--world-size", "64"),
            "sensitivity": ("sensitivity",),
        },
    ),
    "qwen3-235b": Case(
        plan=(
            "--model",
            "qwen3-235b-a22b",
            "--world-size",
            "64",
            "--profile",
            "gb200-nvl72",
            "--target",
            "bridge",
            "--global-batch",
            "512",
            "--seq",
            "4k",
        ),
        questions=BOTH,
    ),
    "gpt-oss-pinned": Case(
        plan=(
            "--model",
            "gpt-oss-20b",
            "--world-size",
            "16",
            "--profile",
            "b200-x8",
            "--target",
            "megatron",
            "--tp",
            "2",
            "--ep",
            "8",
            "--zero",
            "1",
            *_STEP,
        ),
        questions=EXPLAIN,
    ),
    "uneven": Case(
        plan=_UNEVEN,
        questions={
            **BOTH,
            "ranks": ("whatif", "--world-size", "16"),
            "sensitivity": ("sensitivity",),
        },
    ),
    "uneven-natural": Case(plan=(*_UNEVEN, "--expert-placement", "natural"), questions=EXPLAIN),
    "uneven-swiglu": Case(plan=(*_UNEVEN, "--activation", "swiglu"), questions=EXPLAIN),
    **{
        f"uneven-{strategy}": Case(
            plan=(*_A100, *_LOADS, "--strategy", strategy), questions=EXPLAIN
        )
        for strategy in ("none", "S1", "S2", "S3", "S4")
    },
    **{
        f"pinned-{name}": Case(plan=plan, questions=EXPLAIN if "natural" in plan else BOTH)
        for name, plan in _PINNED.items()
    },
    "llama": Case(
        plan=("--model", "llama-3.1-8b", "--world-size", "8", "--profile", "h200-x8", *_STEP),
        questions=EXPLAIN,
    ),
    "chunks": Case(plan=(*_DENSE, "--memory-limit", "40GiB"), questions=BOTH),
    "chunks-resident": Case(
        plan=(*_DENSE, "--offload-optimizer", "0", "--memory-limit", "79GiB"), questions=EXPLAIN
    ),
    "chunks-x4": Case(
        plan=("--model", "gpt-20b", "--world-size", "4", "--profile", "a100-x4"), questions=EXPLAIN
    ),
}
"""Layers, whole models and chunks; every strategy, order, pin and profile."""

_MEMORY = ("--world-size", "16", "--device-memory", "80GB", "--seq", "4k")
DOCUMENTS = {
    "fit-lab": ("profiles", "show", LAB),
    **{
        f"fit-{name}": ("profiles", "show", name)
        for name in ("rtx2080ti-x64", "v100-x256", "a100-x4")
    },
    **{
        f"sizes-{name}": ("models", "show", name)
        for name in ("deepseek-v3", "gpt-oss-120b", "nemotron-3-nano", "qwen3-next", "kimi-linear")
    },
    "memory-qwen3": ("memory", "qwen3-30b-a3b", *_MEMORY, "--target", "torchtitan", "--ep", "8"),
    "memory-mixtral": ("memory", "mixtral-8x7b", *_MEMORY),
}
"""Fits of profiles, sizes of models and memory by part, which no plan's file is needed for."""
