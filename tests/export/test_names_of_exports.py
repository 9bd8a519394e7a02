"""Every name that an export writes is one that the target's version knows.

`known/` holds what the versions' own classes and parsers listed (`benchmarks/export_checks.py`).
"""

import ast
import inspect
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moetune.domain.targets import find_target
from moetune.export.transformers import FIXED_EXPERT_KERNELS, SHARDED
from moetune.runtime.moe.layer import MoELayer
from tests.export.plans import (
    DEEPSEEK,
    LAYOUT,
    PIPELINE,
    deepspeed_config,
    exported,
    known,
    plan_document,
)

FLAT = plan_document(LAYOUT)
SPLIT = plan_document(PIPELINE)
LATENT = plan_document(
    {**PIPELINE, "dp": 16, "pp": 16, "vpp": 2, "ep": 64, "dispatcher": "hybrid_ep",
     "recompute": ["moe_act", "norm", "mla_up_proj", "shared_experts"]},
    DEEPSEEK, dtype="fp8",
)  # fmt: skip
PLAIN = plan_document(
    {**PIPELINE, "vpp": 1, "cp": 2, "tp": 2, "zero": 0, "recompute": ["none"], "overlap": "none",
     "dispatcher": "all_gather"}
)  # fmt: skip
NARROW = plan_document(PIPELINE, optimizer="adam-bf16")
FOUR_BITS = plan_document(PIPELINE, dtype="nvfp4", profile="b200-x8")
OFFLOADED = plan_document({**LAYOUT, "recompute": ["none"], "zero": 1, "offload_activations": 0.2})
HOST = plan_document({**LAYOUT, "zero": 1, "offload_optimizer": 0.5})
MEGATRONS = {"flat": FLAT, "split": SPLIT, "latent": LATENT, "plain": PLAIN, "narrow": NARROW,
             "offloaded": OFFLOADED, "host": HOST, "four bits": FOUR_BITS}  # fmt: skip
TITANS = {
    "flat": FLAT,
    "split": plan_document({**PIPELINE, "recompute": ["full"], "overlap": "none", "zero": 2}),
    "latent": plan_document({**LAYOUT, "dp": 1024, "recompute": ["none"]}, DEEPSEEK),
}
GATHERED = {**LAYOUT, "dp": 64, "tp": 4, "ep": 4, "dispatcher": "all_gather"}
FSDPS = {"flat": FLAT, "folded": plan_document({**LAYOUT, "dp": 64, "tp": 4})}


def assigned(text: str) -> Iterator[tuple[str, str]]:
    """Yield ("a", "b") for each statement `x.a.b = …`, and ("", "a") for `x.a = …`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Attribute):
            owner = target.value
            yield owner.attr if isinstance(owner, ast.Attribute) else "", target.attr


def arguments(text: str, call: str) -> set[str]:
    """Return the named arguments of the calls of a function."""
    return {
        word.arg
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == call
        for word in node.keywords
        if word.arg
    }


def flags(text: str) -> dict[str, list[str]]:
    """Return the values of each flag of a script's MODEL and LAYOUT."""
    bodies = (text.partition(f"{name}=(")[2].partition("\n)\n")[0] for name in ("MODEL", "LAYOUT"))
    values: dict[str, list[str]] = {}
    last: list[str] = []
    for word in shlex.split("\n".join(bodies)):
        if word.startswith("--"):
            assert word not in values
            last = values[word] = []
        else:
            last.append(word)
    return values


@pytest.mark.parametrize("name", MEGATRONS)
def test_megatron_knows_the_flags_and_their_choices(tmp_path: Path, name: str) -> None:
    text = exported(tmp_path, "megatron", MEGATRONS[name]).text
    facts = known("megatron-lm")["known"]["flags"]
    for flag, values in flags(text).items():
        assert flag in facts
        assert facts[flag] is None or set(values) <= set(facts[flag])
    assert flags(text)["--expert-tensor-parallel-size"] == ["1"]
    script = tmp_path / "layout.sh"
    script.write_text(text)
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("name", MEGATRONS)
def test_bridge_knows_the_fields(tmp_path: Path, name: str) -> None:
    text = exported(tmp_path, "bridge@0.3", MEGATRONS[name]).text
    facts, core = known("megatron-bridge")["known"], known("megatron-core")["known"]
    for part, field in assigned(text):
        assert field in (facts[part] if part else facts), (part, field)
    assert arguments(text, "CommOverlapConfig") <= set(facts["comm_overlap"])
    ours = {field for part, field in assigned(text) if part == "model"}
    provider = {"seq_length"}  # the one field here of Bridge's provider, not of Megatron-Core
    assert ours - provider <= set(core["TransformerConfig"])


@pytest.mark.parametrize("name", TITANS)
def test_torchtitan_knows_the_fields(tmp_path: Path, name: str) -> None:
    text = exported(tmp_path, "torchtitan", TITANS[name]).text
    facts = known("torchtitan")["known"]
    for part, field in assigned(text):
        assert field in facts[part or "config"], (part, field)
    assert arguments(text, "ParallelismConfig") <= set(facts["ParallelismConfig"])


@pytest.mark.parametrize("name", [*FSDPS, "gathered"])
def test_transformers_knows_the_fields(tmp_path: Path, name: str) -> None:
    document = FSDPS[name] if name in FSDPS else plan_document(GATHERED)
    text = exported(tmp_path, "transformers", document).text
    facts = known("transformers")["known"]
    for call in ("DistributedConfig", "TrainingArguments"):
        words = arguments(text, call)
        assert words
        assert words <= set(facts[call])


def test_families_of_transformers_refuse_the_kernel_that_exports_do_not_name() -> None:
    experts = {"mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "olmoe", "granitemoe", "jamba"}
    for family in experts | FIXED_EXPERT_KERNELS:
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(CONFIG_MAPPING[family]())]
        assert kind._can_set_experts_implementation() == (family in experts)
    assert "grouped_mm" in ALL_EXPERTS_FUNCTIONS


@pytest.mark.parametrize("family", SHARDED)
def test_transformers_shards_modules_that_its_classes_have(family: str) -> None:
    given = {"attn_config": {"rope_theta": 1e4}} if family == "dbrx" else {}
    config = CONFIG_MAPPING[family](**given)
    config.num_hidden_layers = 2
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = {re.sub(r"\.\d+", ".*", name) for name, _ in model.named_modules()}
    assert set(SHARDED[family]) <= names
    rules = {**model.fsdp_plan, **SHARDED[family]}
    blocks = {name for name in names if re.fullmatch(r"\w+\.\w+\.\*", name)}
    assert len(blocks) == 1
    assert blocks <= set(rules)
    embedding = next(
        name for name, part in model.named_modules() if part is model.get_input_embeddings()
    )
    assert embedding in rules


@pytest.mark.parametrize("name", FSDPS)
def test_deepspeed_reads_the_keys(tmp_path: Path, name: str) -> None:
    document = deepspeed_config(exported(tmp_path, "deepspeed", FSDPS[name]).text)
    facts = known("deepspeed")["known"]
    assert set(document["expert_parallel"]) <= set(facts["expert_parallel"])
    assert document["expert_parallel"]["preset_model"] in facts["presets"]
    assert set(document["zero_optimization"]) <= set(facts["zero_optimization"])
    rest = set(document) - {"expert_parallel", "zero_optimization", "tensor_parallel"}
    assert rest == {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "bf16",
                    "optimizer", "dataloader_drop_last"}  # fmt: skip


def test_moetune_runs_the_module(tmp_path: Path) -> None:
    layout = {**LAYOUT, "dp": 32, "pp": 8, "zero": 1, "ep": 16}
    text = exported(tmp_path, "moetune", plan_document(layout)).text
    module: dict[str, Any] = {}
    exec(text, module)  # noqa: S102 - its names are there
    assert module["LAYOUT"].world_size == 256
    assert (module["LAYOUT"].zero, module["LAYOUT"].ep) == (1, 16)
    assert {"bias", "dtype"} <= arguments(text, "ranks.expert_layer")
    assert arguments(text, "ranks.expert_layer") <= set(inspect.signature(MoELayer).parameters)


@pytest.mark.parametrize(
    ("target", "package"),
    [("megatron@0.16", "megatron-core"), ("bridge@0.3", "megatron-bridge"),
     ("torchtitan", "torchtitan"), ("transformers", "transformers"), ("deepspeed", "deepspeed")],
)  # fmt: skip
def test_facts_are_of_the_targets_version(target: str, package: str) -> None:
    facts: dict[str, Any] = known(package)
    assert find_target(target).version.split()[-1] == facts["version"]
