"""Exports say the plan's layout in the target's own words, and what they cannot say."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import get_schedule_class

from moetune.domain.errors import InfeasiblePlanError
from tests.export.plans import (
    DEEPSEEK,
    LAYOUT,
    PIPELINE,
    QWEN,
    deepspeed_config,
    exported,
    plan_document,
)
from tests.export.test_names_of_exports import flags

LATENT = {**PIPELINE, "dp": 16, "pp": 16, "vpp": 2, "ep": 64}
INTERLEAVED = {**PIPELINE, "recompute": ["full"], "overlap": "none", "zero": 2}


def megatron(folder: Path, layout: dict[str, Any], model: dict[str, Any] = QWEN) -> str:
    return exported(folder, "megatron", plan_document(layout, model)).export.text


def test_megatron_gets_each_size_and_the_batch(tmp_path: Path) -> None:
    given = flags(megatron(tmp_path, PIPELINE))
    sizes = {
        "--tensor-model-parallel-size": 4, "--pipeline-model-parallel-size": 8,
        "--context-parallel-size": 1, "--expert-model-parallel-size": 32,
        "--expert-tensor-parallel-size": 1, "--micro-batch-size": 1, "--global-batch-size": 2048,
        "--seq-length": 4096,
    }  # fmt: skip
    assert {flag: int(given[flag][0]) for flag in sizes} == sizes
    assert given["--moe-token-dispatcher-type"] == ["flex"]
    assert given["--moe-flex-dispatcher-backend"] == ["deepep"]
    assert given["--recompute-modules"] == ["moe_act", "layernorm"]
    for switch in (
        "--sequence-parallel", "--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute",
        "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather",
    ):  # fmt: skip
        assert given[switch] == []


OFFLOADED = {
    **LAYOUT, "recompute": ["none"], "zero": 1, "offload_activations": 0.25,
}  # fmt: skip


def test_megatron_gets_the_number_of_blocks_whose_activations_leave(tmp_path: Path) -> None:
    given = flags(megatron(tmp_path, OFFLOADED))
    assert given["--cpu-offloading-num-layers"] == ["24"]  # of 94, rounded up
    assert "--cpu-offloading" not in given  # follows from it, and is no flag
    assert "--cpu-offloading-num-layers" not in flags(megatron(tmp_path, LAYOUT))


def test_bridge_gets_both_fields_and_unsets_those_of_a_recipe(tmp_path: Path) -> None:
    text = exported(tmp_path, "bridge", plan_document(OFFLOADED)).export.text
    assert "cfg.model.cpu_offloading = True\n" in text
    assert "cfg.model.cpu_offloading_num_layers = 24\n" in text
    assert "cfg.model.cpu_offloading = False\n" in exported(
        tmp_path, "bridge", plan_document(LAYOUT)
    ).export.text  # fmt: skip


HOST = {**LAYOUT, "zero": 1, "offload_optimizer": 0.5}


def test_both_megatrons_get_the_share_of_the_optimizer_that_the_host_keeps(tmp_path: Path) -> None:
    given = flags(megatron(tmp_path, HOST))
    assert given["--optimizer-offload-fraction"] == ["0.5"]
    assert given["--optimizer-cpu-offload"] == given["--overlap-cpu-optimizer-d2h-h2d"] == []
    assert given["--use-precision-aware-optimizer"] == []
    text = exported(tmp_path, "bridge", plan_document(HOST)).export.text
    assert "cfg.optimizer.optimizer_cpu_offload = True\n" in text
    assert "cfg.optimizer.optimizer_offload_fraction = 0.5\n" in text
    plain = exported(tmp_path, "bridge", plan_document(LAYOUT)).export.text
    assert "cfg.optimizer.optimizer_cpu_offload = False\n" in plain


@pytest.mark.parametrize(
    ("layout", "model", "blocks", "predictions"),
    [(PIPELINE, QWEN, 94, 0), (LATENT, DEEPSEEK, 61, 1)],
)
def test_megatrons_stages_have_every_block_once(
    tmp_path: Path, layout: dict[str, Any], model: dict[str, Any], blocks: int, predictions: int
) -> None:
    [letters] = flags(megatron(tmp_path, layout, model))["--pipeline-model-parallel-layout"]
    stages = letters.split("|")
    assert len(stages) == layout["pp"] * layout["vpp"]
    assert letters.count("t") == blocks
    assert stages[0].startswith("Et")
    assert stages[-1].endswith("m" * predictions + "L")
    assert letters.count("m") == predictions
    sizes = [stage.count("t") for stage in stages]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("change", "connections"),
    [
        ({"overlap": "none"}, "1"),
        ({}, "32"),
        ({"pp": 1, "vpp": 1, "dp": 64, "overlap": "none", "zero": 3}, "32"),
    ],
)
def test_connections_are_one_unless_streams_must_run_together(
    tmp_path: Path, change: dict[str, Any], connections: str
) -> None:
    text = megatron(tmp_path, {**PIPELINE, **change})
    assert f"export CUDA_DEVICE_MAX_CONNECTIONS={connections}\n" in text
    bridge = exported(tmp_path, "bridge", plan_document({**PIPELINE, **change})).export
    assert f" CUDA_DEVICE_MAX_CONNECTIONS={connections} torchrun" in bridge.launch


@pytest.mark.parametrize("target", ["moetune", "bridge", "torchtitan"])
@pytest.mark.parametrize("profile", ["h100-x8", "gone"])
def test_a_launch_over_nodes_asks_for_an_address_first(
    tmp_path: Path, target: str, profile: str
) -> None:
    """Without one torchrun's rendezvous has no host, and waits for minutes."""
    launch = exported(tmp_path, target, plan_document(LAYOUT, profile=profile)).export.launch
    assert launch.startswith(': "${MASTER_ADDR:?')
    assert ("${NNODES:?" in launch) == (profile == "gone")


def test_gradients_and_parameters_in_shards_are_megatrons_fsdp(tmp_path: Path) -> None:
    names = {2: "optim_grads", 3: "optim_grads_params"}
    for stage, name in names.items():
        given = flags(megatron(tmp_path, {**LAYOUT, "zero": stage}))
        assert given["--data-parallel-sharding-strategy"] == [name]
        assert given["--ckpt-format"] == ["fsdp_dtensor"]
        assert "--use-megatron-fsdp" in given
    none = flags(megatron(tmp_path, {**LAYOUT, "zero": 0}))
    assert not {"--use-distributed-optimizer", "--use-megatron-fsdp"} & set(none)


@pytest.mark.parametrize(
    ("model", "ranks", "scope"),
    [
        (QWEN, {}, ["attn", "moe_router", "moe_preprocess"]),
        (DEEPSEEK, {**LATENT, "recompute": ["moe_act"]}, ["attn", "moe_router", "moe_preprocess"]),
        (DEEPSEEK, {**LATENT, "recompute": ["moe_act"], "overlap": "none"},
         ["attn", "mlp", "moe_router", "moe_preprocess"]),
        ({**QWEN, "model": "nemotron-3-nano"},
         {"pp": 1, "vpp": 1, "dp": 64, "recompute": ["norm"], "overlap": "none"},
         ["attn", "mamba", "moe_router", "moe_preprocess"]),
    ],
)  # fmt: skip
def test_partial_graphs_hold_all_but_exchanges_and_experts(
    tmp_path: Path, model: dict[str, Any], ranks: dict[str, Any], scope: list[str]
) -> None:
    layout = {**PIPELINE, **ranks, "cuda_graphs": "partial"}
    given = flags(megatron(tmp_path, layout, model))
    assert given["--cuda-graph-impl"] == ["transformer_engine"]
    assert given["--cuda-graph-scope"] == scope
    bridge = exported(tmp_path, "bridge@0.3", plan_document(layout, model)).export.text
    assert f"    cfg.model.cuda_graph_scope = {scope!r}\n" in bridge
    bridge = exported(tmp_path, "bridge@0.5", plan_document(layout, model)).export.text
    assert f"    cfg.model.cuda_graph_modules = {scope!r}\n" in bridge


@pytest.mark.parametrize("graphs", ["none", "partial", "full"])
def test_sharded_gradients_outlive_a_replayed_graph(tmp_path: Path, graphs: str) -> None:
    sizes = {"recompute": ["none"], "dispatcher": "hybrid_ep", "cuda_graphs": graphs}
    layout = {**LAYOUT, **sizes, "zero": 3}
    own = exported(tmp_path, "bridge@0.6", plan_document(layout)).export.text
    mode = "cfg.ddp.megatron_fsdp_cuda_graph_mode = True"
    gathers = "cfg.ddp.fsdp_all_gather_in_start_param_sync = False"
    assert (mode in own, gathers in own) == (graphs != "none", graphs == "full")
    whole = exported(tmp_path, "bridge@0.6", plan_document({**layout, "zero": 1}))
    assert mode not in whole.export.text


@pytest.mark.parametrize(
    ("dtype", "megatrons", "bridges"),
    [
        ("mxfp8", ["--fp8-format e4m3", "--fp8-recipe mxfp8"], {"fp8": "e4m3"}),
        ("nvfp4", ["--fp4-format e2m1", "--fp4-recipe nvfp4"], {"fp4": "e2m1"}),
    ],
)
def test_narrow_formats_have_the_runtimes_own_words(
    tmp_path: Path, dtype: str, megatrons: list[str], bridges: dict[str, str]
) -> None:
    document = plan_document(PIPELINE, dtype=dtype, profile="b200-x8")
    script = exported(tmp_path, "megatron", document).export.text
    assert [line.strip() for line in script.splitlines() if "--fp" in line] == megatrons
    text = exported(tmp_path, "bridge", document).export.text
    for name, value in bridges.items():
        assert f"    cfg.mixed_precision.{name} = {value!r}\n" in text
        assert f"    cfg.mixed_precision.{name}_recipe = {dtype!r}\n" in text


def test_bridge_gets_what_megatron_gets(tmp_path: Path) -> None:
    text = exported(tmp_path, "bridge", plan_document(LATENT, DEEPSEEK, dtype="fp8")).export.text
    for line in (
        "cfg.model.expert_tensor_parallel_size = 1",
        "cfg.model.virtual_pipeline_model_parallel_size = 2",
        "cfg.model.mtp_num_layers = 1",
        "cfg.mixed_precision.fp8_recipe = 'blockwise'",
        "cfg.train.global_batch_size = 8192",
        "cfg.model.moe_flex_dispatcher_backend = 'deepep'",
    ):
        assert f"    {line}\n" in text
    [letters] = re.findall(r"pipeline_model_parallel_layout = '(.*)'", text)
    assert [letters] == flags(megatron(tmp_path, LATENT, DEEPSEEK))[
        "--pipeline-model-parallel-layout"
    ]


def test_a_pipeline_of_torchtitan_takes_all_micro_batches_at_once(tmp_path: Path) -> None:
    found = exported(tmp_path, "torchtitan", plan_document(INTERLEAVED)).export
    values = {
        node.arg: ast.literal_eval(node.value)
        for node in ast.walk(ast.parse(found.text))
        if isinstance(node, ast.keyword) and isinstance(node.value, (ast.Constant, ast.List))
    }
    stages = values["module_fqns_per_model_part"]
    assert [name for stage in stages for name in stage] == [
        "tok_embeddings", *(f"layers.{at}" for at in range(94)), "norm", "lm_head",
    ]  # fmt: skip
    assert len(stages) == 32
    assert values["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert values["pipeline_parallel_microbatch_size"] == 1
    assert values["fsdp_reshard_after_forward"] == "never"
    assert values["data_parallel_shard_degree"] == 8
    assert values["moe_comm_backend"] == "deepep"
    assert "config.training.local_batch_size = 256\n" in found.text
    assert "--config planned" in found.launch
    assert "--nnodes 32 --nproc-per-node 8" in found.launch
    flat = exported(tmp_path, "torchtitan", plan_document(LAYOUT)).export.text
    assert "config.training.local_batch_size = 1\n" in flat
    assert 'fsdp_reshard_after_forward="always"' in flat


def test_sequences_of_a_step_follow_from_the_batch_of_transformers_and_deepspeed(
    tmp_path: Path,
) -> None:
    document = plan_document({**LAYOUT, "micro_batch": 2})
    text = exported(tmp_path, "transformers", document).export.text
    given = {one: int(size) for one, size in re.findall(r"(\w+)=(\d+),", text)}
    assert (
        given["per_device_train_batch_size"]
        * given["gradient_accumulation_steps"]
        * given["fsdp_size"]
        == 2048
    )
    assert given["ep_size"] == 32
    assert "gradient_checkpointing=True" in text
    assert '"Qwen/Qwen3-235B-A22B"' in text
    plain = deepspeed_config(exported(tmp_path, "deepspeed", document).export.text)
    assert (
        plain["train_micro_batch_size_per_gpu"] * plain["gradient_accumulation_steps"] * 256 == 2048
    )
    assert plain["zero_optimization"]["stage"] == 3
    assert plain["expert_parallel"]["autoep_size"] == 32


def test_tensor_parallelism_of_transformers_and_deepspeed(tmp_path: Path) -> None:
    document = plan_document({**LAYOUT, "dp": 128, "tp": 2})
    found = exported(tmp_path, "transformers", document).export
    assert "tp_size=2," in found.text
    assert any("sequence parallelism" in one for one in found.not_expressed)
    beside = exported(tmp_path, "deepspeed", document).export
    tensor = deepspeed_config(beside.text)["tensor_parallel"]
    assert tensor["autotp_size"] == 2
    cut = {
        spec["partition_type"]: spec["patterns"]
        for spec in tensor["partition_config"]["layer_specs"]
    }
    assert set(cut) == {"column", "row", "skip"}
    assert any("sequence parallelism" in one for one in beside.not_expressed)


def test_deepspeeds_program_shards_what_it_loads_with_zero_3_alone(tmp_path: Path) -> None:
    text = exported(tmp_path, "deepspeed", plan_document(LAYOUT)).export.text
    assert "config = HfDeepSpeedConfig(whole)" in text
    halves = exported(tmp_path, "deepspeed", plan_document({**LAYOUT, "zero": 2})).export.text
    assert "HfDeepSpeedConfig" not in halves


def test_a_plan_for_another_target_or_without_room_says_so(tmp_path: Path) -> None:
    document = plan_document(LAYOUT, target="torchtitan") | {"fits": False, "id": "feed1234" * 8}
    text = exported(
        tmp_path, "megatron", {"schema": "moetune.error/1", "plan": document}
    ).export.text
    assert "Planned for torchtitan" in text
    assert "does not fit" in text
    assert "feed12" in text


@pytest.mark.parametrize(
    ("to", "change", "dtype", "words"),
    [
        ("transformers", {}, "bfloat16", "multi-token prediction"),
        ("deepspeed", {}, "bfloat16", "multi-token prediction"),
        ("torchtitan", {}, "bfloat16", "multi-token prediction"),
        ("moetune", {"zero": 1, "dp": 128, "pp": 8}, "bfloat16", "pp 8"),
    ],
)
def test_what_a_target_has_no_key_for_is_said(
    tmp_path: Path, to: str, change: dict[str, Any], dtype: str, words: str
) -> None:
    document = plan_document(
        {**LAYOUT, "dp": 1024, **change}, DEEPSEEK, dtype=dtype, profile="b200-x8"
    )
    found = exported(tmp_path, to, document).export
    assert any(words in one for one in found.not_expressed)


def test_mxfp8_of_torchtitan_is_its_converters(tmp_path: Path) -> None:
    layout = {**LAYOUT, "dp": 1024}
    document = plan_document(layout, DEEPSEEK, dtype="mxfp8", profile="b200-x8")
    text = exported(tmp_path, "torchtitan", document).export.text
    calls = {
        ast.unparse(node.func) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)
    }
    assert {"MXFP8LinearConverter.Config", "MXFP8GroupedExpertsConverter.Config"} <= calls
    with pytest.raises(InfeasiblePlanError, match="the dtype mxfp8 on h100"):
        exported(tmp_path, "torchtitan", plan_document(layout, DEEPSEEK, dtype="mxfp8"))


def test_published_weights_in_four_bits_are_dequantized(tmp_path: Path) -> None:
    model = {"model": "gpt-oss-20b", "world_size": 64, "global_batch": 256}
    layout = {**LAYOUT, "dp": 64, "ep": 32}
    text = exported(tmp_path, "transformers", plan_document(layout, model)).export.text
    assert "quantization_config=Mxfp4Config(dequantize=True)," in text
    assert "import AutoModelForCausalLM, Mxfp4Config, Trainer" in text
    plain = exported(tmp_path, "transformers", plan_document(LAYOUT)).export.text
    assert "Mxfp4" not in plain


def test_deepspeeds_launcher_gets_the_nodes_and_the_data(tmp_path: Path) -> None:
    found = exported(tmp_path, "deepspeed", plan_document(LAYOUT)).export
    assert found.launch.startswith('deepspeed --hostfile "${HOSTFILE:?')
    assert "--num_nodes 32 --num_gpus 8 deepspeed_layout.py --data" in found.launch
    assert "ssh reaches all 32" in found.text
    few = {"model": "olmoe", "world_size": 4, "global_batch": 64}
    alone = exported(tmp_path, "deepspeed", plan_document({**LAYOUT, "dp": 4, "ep": 1}, few)).export
    assert alone.launch.startswith("deepspeed --num_gpus 4 deepspeed_layout.py")
    assert "Start it on one node of 4 GPUs" in alone.text
    assert 'default="allenai/OLMoE' in alone.text


@pytest.mark.parametrize("to", ["transformers", "deepspeed"])
def test_a_router_of_no_groups_gets_one_where_its_class_divides_by_them(
    tmp_path: Path, to: str
) -> None:
    named = {"model": "dots.llm1", "world_size": 256, "global_batch": 2048}
    layout = {**LAYOUT, "ep": 32 if to == "transformers" else 1}
    text = exported(tmp_path, to, plan_document(layout, named)).export.text
    assert "        n_group=1,\n        topk_group=1,\n" in text
    assert "n_group" not in exported(tmp_path, to, plan_document(LAYOUT)).export.text


def test_transformers_shards_blocks_whose_names_its_rules_do_not_have(tmp_path: Path) -> None:
    named = {"model": "dbrx", "world_size": 256, "global_batch": 2048}
    text = exported(tmp_path, "transformers", plan_document({**LAYOUT, "ep": 1}, named)).export.text
    assert '"transformer.blocks.*": "free_full_weight",\n' in text
    assert "fsdp_plan" not in exported(tmp_path, "transformers", plan_document(LAYOUT)).export.text


@pytest.mark.parametrize(
    ("to", "change", "words"),
    [
        ("megatron", {"recompute": ["moe", "norm"]}, "overlap batch with recomputation of moe"),
        ("bridge", {"zero": 3}, "ZeRO-3 with pp 8"),
        ("torchtitan", {}, "recomputation of moe_act"),
        ("transformers", {}, "pp 8"),
        ("deepspeed", {}, "pp 8"),
        ("deepspeed", {**LAYOUT, "etp": 2, "edp": 4}, "etp 2"),
        ("deepspeed", {**LAYOUT, "dp": 128, "tp": 2, "ep": 1}, "tp 2 with ep 1"),
        ("transformers", {**LAYOUT, "dp": 128, "tp": 2, "ep": 1}, "tp 2 with ep 1"),
        ("transformers", {**LAYOUT, "dp": 64, "tp": 4, "ep": 2}, "ep 2 with tp 4"),
        ("transformers", {**LAYOUT, "dispatcher": "all_gather"}, "all_gather with ep 32 and tp 1"),
        ("torchtitan", {**LAYOUT, "dp": 64, "tp": 4, "ep": 1, "etp": 2, "zero": 2}, "etp 2"),
        ("moetune", {**LAYOUT, "zero": 2}, "ZeRO stage 2"),
    ],
)
def test_a_layout_that_the_target_cannot_run_is_refused_by_name(
    tmp_path: Path, to: str, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(InfeasiblePlanError, match=re.escape(words)) as refused:
        exported(tmp_path, to, plan_document({**PIPELINE, **change}))
    assert refused.value.what.startswith(f"{to} (")
    assert refused.value.hint


@pytest.mark.parametrize(
    ("optimizer", "moments"), [("adam-remainders", "fp32"), ("adam-bf16", "bf16")]
)
def test_precision_aware_optimizers_get_their_dtypes(
    tmp_path: Path, optimizer: str, moments: str
) -> None:
    document = plan_document(PIPELINE, optimizer=optimizer)
    given = flags(exported(tmp_path, "megatron", document).export.text)
    assert given["--exp-avg-dtype"] == given["--exp-avg-sq-dtype"] == [moments]
    assert given["--main-grads-dtype"] == ["bf16"]
    assert given["--main-params-dtype"] == ["fp32"]
    assert {"--use-precision-aware-optimizer", "--grad-reduce-in-bf16"} <= set(given)
    bridge = exported(tmp_path, "bridge", document).export.text
    width = {"fp32": "float32", "bf16": "bfloat16"}[moments]
    for line in (
        "cfg.optimizer.use_precision_aware_optimizer = True",
        f"cfg.optimizer.exp_avg_sq_dtype = torch.{width}",
        "cfg.ddp.grad_reduce_in_fp32 = False",
        "cfg.mixed_precision.grad_reduce_in_fp32 = False",
    ):
        assert f"    {line}\n" in bridge


def test_bridges_master_copy_follows_the_recipe_of_fp8(tmp_path: Path) -> None:
    for optimizer, recipe in (("adam-bf16", "delayed"), ("adam-bf16-moments", "tensorwise")):
        document = plan_document(PIPELINE, optimizer=optimizer)
        text = exported(tmp_path, "bridge", document).export.text
        assert f"    cfg.mixed_precision.fp8_recipe = {recipe!r}\n" in text


def test_plain_adam_takes_back_a_recipes_other_optimizer(tmp_path: Path) -> None:
    plain = plan_document(PIPELINE)
    given = flags(exported(tmp_path, "megatron", plain).export.text)
    assert not {"--use-precision-aware-optimizer", "--grad-reduce-in-bf16"} & set(given)
    bridge = exported(tmp_path, "bridge", plain).export.text
    for line in (
        "cfg.optimizer.use_precision_aware_optimizer = False",
        "cfg.optimizer.main_grads_dtype = torch.float32",
        "cfg.ddp.grad_reduce_in_fp32 = True",
    ):
        assert f"    {line}\n" in bridge


def test_gradients_in_bfloat16_need_no_other_optimizer(tmp_path: Path) -> None:
    plain = plan_document(PIPELINE, optimizer="adam-bf16-grads")
    given = flags(exported(tmp_path, "megatron", plain).export.text)
    assert "--grad-reduce-in-bf16" in given
    assert "--use-precision-aware-optimizer" not in given
    bridge = exported(tmp_path, "bridge", plain).export.text
    assert "    cfg.optimizer.use_precision_aware_optimizer = False\n" in bridge
    assert "    cfg.ddp.grad_reduce_in_fp32 = False\n" in bridge


@pytest.mark.parametrize(
    ("schedule", "vpp", "name"),
    [
        ("1f1b", 1, "1F1B"),
        ("interleaved", 4, "Interleaved1F1B"),
        ("zero_bubble", 1, "InterleavedZeroBubble"),
        ("zero_bubble_v", 2, "ZBVZeroBubble"),
        ("dualpipe_v", 2, "DualPipeV"),
    ],
)
def test_torchtitan_gets_torchs_name_of_the_schedule(
    tmp_path: Path, schedule: str, vpp: int, name: str
) -> None:
    layout = {**INTERLEAVED, "schedule": schedule, "vpp": vpp, "stages": None}
    text = exported(tmp_path, "torchtitan", plan_document(layout)).export.text
    assert get_schedule_class(name).__name__ == f"Schedule{name}"
    assert f'pipeline_parallel_schedule="{name}"' in text
    assert ("splits backward passes" in text) == (schedule not in ("1f1b", "interleaved"))


def test_stages_by_hand_are_exported_block_by_block(tmp_path: Path) -> None:
    letters = "Et*3|(tt|)*29m|L"
    layout = {**PIPELINE, "dp": 32, "ep": 64, "schedule": "interleaved", "stages": letters}
    [given] = flags(megatron(tmp_path, layout, DEEPSEEK))["--pipeline-model-parallel-layout"]
    assert given.split("|") == ["Ettt", *["tt"] * 29, "m", "L"]
    plain = {**layout, "recompute": ["full"], "overlap": "none", "zero": 2}
    with pytest.raises(InfeasiblePlanError, match="earlier stage than the head"):
        exported(tmp_path, "torchtitan", plan_document(plain, DEEPSEEK))


def test_bridge_says_when_a_programs_model_is_code_on_the_hub(tmp_path: Path) -> None:
    layout = {**LAYOUT, "dp": 64, "ep": 1, "edp": 64, "recompute": []}
    hybrid = {"model": "nemotron-h-56b", "world_size": 64, "global_batch": 256}
    text = exported(tmp_path, "bridge", plan_document(layout, hybrid, target="bridge")).export.text
    assert "trust_remote_code=True)" in text
    assert "which the program runs" in text.partition("import torch")[0]
    plain = exported(tmp_path, "bridge", plan_document(LAYOUT, target="bridge")).export.text
    assert "trust_remote_code" not in plain


def test_bridge_makes_the_language_model_of_a_configuration_with_towers(tmp_path: Path) -> None:
    layout = {**LAYOUT, "dp": 64, "ep": 1, "edp": 64, "recompute": [], "dispatcher": "all_to_all"}
    model = {"model": "qwen3.5-27b", "world_size": 64, "global_batch": 256}
    text = exported(tmp_path, "bridge@0.6", plan_document(layout, model)).export.text
    for line in (
        "# It trains the language model alone, without its vision.",
        "    text = AutoConfig.from_pretrained('Qwen/Qwen3.5-27B').text_config",
        "    text.architectures = ['Qwen3_5ForCausalLM']",
        "    bridge = AutoBridge.from_hf_config(text)",
    ):
        assert f"\n{line}\n" in text


@pytest.mark.parametrize(
    ("model", "line"),
    [("ernie-4.5-300b-a47b", "moe_shared_expert_intermediate_size = None"),
     ("ernie-4.5-21b-a3b", ""), ("gemma-4-26b-a4b", "")],
)  # fmt: skip
def test_bridge_gets_no_shared_experts_of_width_zero(tmp_path: Path, model: str, line: str) -> None:
    layout = {**LAYOUT, "dp": 64, "ep": 1, "edp": 64, "recompute": [], "dispatcher": "all_to_all"}
    document = plan_document(layout, {"model": model, "world_size": 64, "global_batch": 256})
    text = exported(tmp_path, "bridge@0.6", document).export.text
    assert ("moe_shared_expert_intermediate_size" in text) == bool(line)
    assert line in text
    assert ("bias_activation_fusion = True" in text) == (model != "gemma-4-26b-a4b")


def test_bridge_unsets_what_recipes_have_beyond_a_plan(tmp_path: Path) -> None:
    document = plan_document({**LAYOUT, "zero": 3})
    old, new = (exported(tmp_path, f"bridge@{one}", document).export.text for one in ("0.4", "0.6"))
    for line in (
        "cfg.model.moe_expert_capacity_factor = None",
        "cfg.model.moe_pad_expert_input_to_capacity = False",
        "cfg.model.microbatch_group_size_per_vp_stage = None",
    ):
        assert line in old
        assert line in new
    assert "cfg.checkpoint.async_save = False" in old
    assert "async_save" not in new
