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
    return exported(folder, "megatron", plan_document(layout, model)).text


def test_megatron_gets_each_size_and_the_batch(tmp_path: Path) -> None:
    given = flags(megatron(tmp_path, PIPELINE))
    sizes = {"--tensor-model-parallel-size": 4, "--pipeline-model-parallel-size": 8,
             "--context-parallel-size": 1, "--expert-model-parallel-size": 32,
             "--expert-tensor-parallel-size": 1, "--micro-batch-size": 1,
             "--global-batch-size": 2048, "--seq-length": 4096}  # fmt: skip
    assert {flag: int(given[flag][0]) for flag in sizes} == sizes
    assert given["--moe-token-dispatcher-type"] == ["flex"]
    assert given["--moe-flex-dispatcher-backend"] == ["deepep"]
    assert given["--recompute-modules"] == ["moe_act", "layernorm"]
    for switch in (
        "--sequence-parallel", "--overlap-moe-expert-parallel-comm", "--delay-wgrad-compute",
        "--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather",
    ):  # fmt: skip
        assert given[switch] == []


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


@pytest.mark.parametrize("target", ["moetune", "bridge", "torchtitan"])
@pytest.mark.parametrize("profile", ["h100-x8", "gone"])
def test_a_launch_over_nodes_asks_for_an_address(tmp_path: Path, target: str, profile: str) -> None:
    """Without one torchrun's rendezvous has no host, and waits for minutes."""
    launch = exported(tmp_path, target, plan_document(LAYOUT, profile=profile)).launch
    assert launch.startswith(': "${MASTER_ADDR:?')
    assert ("${NNODES:?" in launch) == (profile == "gone")


@pytest.mark.parametrize(("model", "ranks", "scope"), [
    (QWEN, {}, ["attn", "moe_router", "moe_preprocess"]),
    (DEEPSEEK, {**LATENT, "recompute": ["moe_act"]}, ["attn", "moe_router", "moe_preprocess"]),
    (DEEPSEEK, {**LATENT, "recompute": ["moe_act"], "overlap": "none"},
     ["attn", "mlp", "moe_router", "moe_preprocess"]),
    ({**QWEN, "model": "nemotron-3-nano"},
     {"pp": 1, "vpp": 1, "dp": 64, "recompute": ["norm"], "overlap": "none"},
     ["attn", "mamba", "moe_router", "moe_preprocess"]),
])  # fmt: skip
def test_partial_graphs_hold_all_but_exchanges_and_experts(
    tmp_path: Path, model: dict[str, Any], ranks: dict[str, Any], scope: list[str]
) -> None:
    layout = {**PIPELINE, **ranks, "cuda_graphs": "partial"}
    given = flags(megatron(tmp_path, layout, model))
    assert given["--cuda-graph-impl"] == ["transformer_engine"]
    assert given["--cuda-graph-scope"] == scope
    bridge = exported(tmp_path, "bridge@0.3", plan_document(layout, model)).text
    assert f"    cfg.model.cuda_graph_scope = {scope!r}\n" in bridge
    bridge = exported(tmp_path, "bridge@0.5", plan_document(layout, model)).text
    assert f"    cfg.model.cuda_graph_modules = {scope!r}\n" in bridge


def test_bridge_gets_what_megatron_gets(tmp_path: Path) -> None:
    text = exported(tmp_path, "bridge", plan_document(LATENT, DEEPSEEK, dtype="fp8")).text
    for line in (
        "cfg.model.expert_tensor_parallel_size = 1",
        "cfg.model.virtual_pipeline_model_parallel_size = 2", "cfg.model.mtp_num_layers = 1",
        "cfg.mixed_precision.fp8_recipe = 'blockwise'", "cfg.train.global_batch_size = 8192",
        "cfg.model.moe_flex_dispatcher_backend = 'deepep'",
    ):  # fmt: skip
        assert f"    {line}\n" in text
    [letters] = re.findall(r"pipeline_model_parallel_layout = '(.*)'", text)
    assert [letters] == flags(megatron(tmp_path, LATENT, DEEPSEEK))[
        "--pipeline-model-parallel-layout"
    ]


def test_a_pipeline_of_torchtitan_takes_all_micro_batches_at_once(tmp_path: Path) -> None:
    script = exported(tmp_path, "torchtitan", plan_document(INTERLEAVED))
    values = {
        node.arg: ast.literal_eval(node.value)
        for node in ast.walk(ast.parse(script.text))
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
    assert "config.training.local_batch_size = 256\n" in script.text
    assert "--config planned" in script.launch
    assert "--nnodes 32 --nproc-per-node 8" in script.launch
    flat = exported(tmp_path, "torchtitan", plan_document(LAYOUT)).text
    assert "config.training.local_batch_size = 1\n" in flat
    assert 'fsdp_reshard_after_forward="always"' in flat


def test_sequences_of_a_step_follow_from_batches_of_each_runtime(tmp_path: Path) -> None:
    document = plan_document({**LAYOUT, "micro_batch": 2})
    text = exported(tmp_path, "transformers", document).text
    given = {name: int(size) for name, size in re.findall(r"(\w+)=(\d+),", text)}
    assert (
        given["per_device_train_batch_size"]
        * given["gradient_accumulation_steps"]
        * given["fsdp_size"]
        == 2048
    )
    assert given["ep_size"] == 32
    assert "gradient_checkpointing=True" in text
    assert '"Qwen/Qwen3-235B-A22B"' in text
    plain = deepspeed_config(exported(tmp_path, "deepspeed", document).text)
    assert (
        plain["train_micro_batch_size_per_gpu"] * plain["gradient_accumulation_steps"] * 256 == 2048
    )
    assert plain["zero_optimization"]["stage"] == 3
    assert plain["expert_parallel"]["autoep_size"] == 32


def test_tensor_parallelism_of_transformers_and_deepspeed(tmp_path: Path) -> None:
    document = plan_document({**LAYOUT, "dp": 128, "tp": 2})
    mesh = exported(tmp_path, "transformers", document)
    assert "tp_size=2," in mesh.text
    assert any("sequence parallelism" in text for text in mesh.not_expressed)
    engine = exported(tmp_path, "deepspeed", document)
    tensor = deepspeed_config(engine.text)["tensor_parallel"]
    assert tensor["autotp_size"] == 2
    cut = {
        spec["partition_type"]: spec["patterns"]
        for spec in tensor["partition_config"]["layer_specs"]
    }
    assert set(cut) == {"column", "row", "skip"}
    assert any("sequence parallelism" in text for text in engine.not_expressed)


def test_mxfp8_of_torchtitan_is_its_converters(tmp_path: Path) -> None:
    layout = {**LAYOUT, "dp": 1024}
    document = plan_document(layout, DEEPSEEK, dtype="mxfp8", profile="b200-x8")
    text = exported(tmp_path, "torchtitan", document).text
    calls = {
        ast.unparse(node.func) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)
    }
    assert {"MXFP8LinearConverter.Config", "MXFP8GroupedExpertsConverter.Config"} <= calls
    with pytest.raises(InfeasiblePlanError, match="the dtype mxfp8 on h100"):
        exported(tmp_path, "torchtitan", plan_document(layout, DEEPSEEK, dtype="mxfp8"))


@pytest.mark.parametrize(("to", "change", "words"), [
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
])  # fmt: skip
def test_a_layout_that_the_target_cannot_run_is_refused_by_name(
    tmp_path: Path, to: str, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(InfeasiblePlanError, match=re.escape(words)) as refused:
        exported(tmp_path, to, plan_document({**PIPELINE, **change}))
    assert refused.value.what.startswith((f"{to} (", f"{to}'s runtime "))
    assert refused.value.hint


@pytest.mark.parametrize(("schedule", "vpp", "name"), [
    ("1f1b", 1, "1F1B"), ("interleaved", 4, "Interleaved1F1B"),
    ("zero_bubble", 1, "InterleavedZeroBubble"), ("zero_bubble_v", 2, "ZBVZeroBubble"),
    ("dualpipe_v", 2, "DualPipeV"),
])  # fmt: skip
def test_torchtitan_has_the_schedules(tmp_path: Path, schedule: str, vpp: int, name: str) -> None:
    layout = {**INTERLEAVED, "schedule": schedule, "vpp": vpp, "stages": None}
    text = exported(tmp_path, "torchtitan", plan_document(layout)).text
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


OFFLOADED = {**LAYOUT, "recompute": ["none"], "zero": 1, "offload_activations": 0.25}
HOST = {**LAYOUT, "zero": 1, "offload_optimizer": 0.5}
FLAT = {**PIPELINE, "pp": 1, "vpp": 1, "dp": 64, "overlap": "none", "zero": 3}
GRAPHED = {**LAYOUT, "recompute": ["none"], "dispatcher": "hybrid_ep", "zero": 3}
ALONE = {**LAYOUT, "dp": 64, "ep": 1, "edp": 64, "recompute": []}
ONE_GROUP = "        n_group=1,\n        topk_group=1,\n"
FSDP = ("--use-megatron-fsdp\n", "--ckpt-format fsdp_dtensor\n")
GRAPH_MODE = "cfg.ddp.megatron_fsdp_cuda_graph_mode = True"
NO_GATHERS = "cfg.ddp.fsdp_all_gather_in_start_param_sync = False"
AWARE = ("--use-precision-aware-optimizer\n", "--main-grads-dtype bf16", "--main-params-dtype fp32")
RESET = (
    "cfg.model.moe_expert_capacity_factor = None",
    "cfg.model.moe_pad_expert_input_to_capacity = False",
    "cfg.model.microbatch_group_size_per_vp_stage = None",
)


def named(model: str, ranks: int = 64) -> dict[str, Any]:
    return {"model": model, "world_size": ranks, "global_batch": 4 * ranks}


ROWS: tuple[tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...], tuple[str, ...]], ...] = (
    # 24 of 94 blocks, rounded up; the flag follows from their number
    ("megatron", OFFLOADED, {}, ("--cpu-offloading-num-layers 24\n",), ("--cpu-offloading\n",)),
    ("megatron", LAYOUT, {}, (), ("--cpu-offloading",)),
    ("bridge", OFFLOADED, {}, ("cfg.model.cpu_offloading = True\n",
                               "cfg.model.cpu_offloading_num_layers = 24\n"), ()),
    ("bridge", LAYOUT, {}, ("cfg.model.cpu_offloading = False\n",
                            "cfg.optimizer.optimizer_cpu_offload = False\n"), ()),
    ("megatron", HOST, {}, ("--optimizer-offload-fraction 0.5", "--optimizer-cpu-offload\n",
                            "--overlap-cpu-optimizer-d2h-h2d\n", AWARE[0]), ()),
    ("bridge", HOST, {}, ("cfg.optimizer.optimizer_cpu_offload = True\n",
                          "cfg.optimizer.optimizer_offload_fraction = 0.5\n"), ()),
    # kernels start in their order unless several streams must run
    ("megatron", {**PIPELINE, "overlap": "none"}, {}, ("MAX_CONNECTIONS=1\n",), ()),
    ("megatron", PIPELINE, {}, ("MAX_CONNECTIONS=32\n",), ()),
    ("megatron", FLAT, {}, ("MAX_CONNECTIONS=32\n",), ()),
    ("megatron", {**LAYOUT, "zero": 2}, {},
     ("--data-parallel-sharding-strategy optim_grads\n", *FSDP), ()),
    ("megatron", LAYOUT, {}, ("--data-parallel-sharding-strategy optim_grads_params\n", *FSDP), ()),
    ("megatron", {**LAYOUT, "zero": 0}, {}, (), ("--use-distributed-optimizer", FSDP[0])),
    # sharded gradients outlive a replayed graph
    ("bridge@0.6", {**GRAPHED, "cuda_graphs": "none"}, {}, (), (GRAPH_MODE, NO_GATHERS)),
    ("bridge@0.6", {**GRAPHED, "cuda_graphs": "partial"}, {}, (GRAPH_MODE,), (NO_GATHERS,)),
    ("bridge@0.6", {**GRAPHED, "cuda_graphs": "full"}, {}, (GRAPH_MODE, NO_GATHERS), ()),
    ("bridge@0.6", {**GRAPHED, "cuda_graphs": "full", "zero": 1}, {}, (), (GRAPH_MODE,)),
    ("megatron", PIPELINE, {"dtype": "mxfp8"}, ("--fp8-format e4m3", "--fp8-recipe mxfp8"), ()),
    ("megatron", PIPELINE, {"dtype": "nvfp4"}, ("--fp4-format e2m1", "--fp4-recipe nvfp4"),
     ("--fp8",)),
    ("bridge", PIPELINE, {"dtype": "mxfp8"},
     ("cfg.mixed_precision.fp8 = 'e4m3'\n", "cfg.mixed_precision.fp8_recipe = 'mxfp8'\n"), ()),
    ("bridge", PIPELINE, {"dtype": "nvfp4"}, ("cfg.mixed_precision.fp4_recipe = 'nvfp4'\n",), ()),
    # optimizers, and those of recipes taken back
    ("megatron", PIPELINE, {"optimizer": "adam-remainders"},
     (*AWARE, "--exp-avg-dtype fp32", "--exp-avg-sq-dtype fp32", "--grad-reduce-in-bf16"), ()),
    ("megatron", PIPELINE, {"optimizer": "adam-bf16"},
     (*AWARE, "--exp-avg-dtype bf16", "--exp-avg-sq-dtype bf16", "--grad-reduce-in-bf16"), ()),
    ("bridge", PIPELINE, {"optimizer": "adam-remainders"},
     ("cfg.optimizer.use_precision_aware_optimizer = True\n",
      "cfg.optimizer.exp_avg_sq_dtype = torch.float32\n",
      "cfg.ddp.grad_reduce_in_fp32 = False\n",
      "cfg.mixed_precision.grad_reduce_in_fp32 = False\n"), ()),
    ("bridge", PIPELINE, {"optimizer": "adam-bf16"},
     ("cfg.optimizer.exp_avg_sq_dtype = torch.bfloat16\n",
      "cfg.mixed_precision.fp8_recipe = 'delayed'\n"), ()),
    ("bridge", PIPELINE, {"optimizer": "adam-bf16-moments"},
     ("cfg.mixed_precision.fp8_recipe = 'tensorwise'\n",), ()),
    ("megatron", PIPELINE, {}, (), (AWARE[0], "--grad-reduce-in-bf16")),
    ("bridge", PIPELINE, {}, ("cfg.optimizer.use_precision_aware_optimizer = False\n",
                              "cfg.optimizer.main_grads_dtype = torch.float32\n",
                              "cfg.ddp.grad_reduce_in_fp32 = True\n"), ()),
    ("megatron", PIPELINE, {"optimizer": "adam-bf16-grads"}, ("--grad-reduce-in-bf16",),
     (AWARE[0],)),
    ("bridge", PIPELINE, {"optimizer": "adam-bf16-grads"},
     ("cfg.optimizer.use_precision_aware_optimizer = False\n",
      "cfg.ddp.grad_reduce_in_fp32 = False\n"), ()),
    ("bridge@0.4", LAYOUT, {}, (*RESET, "cfg.checkpoint.async_save = False"), ()),
    ("bridge@0.6", LAYOUT, {}, RESET, ("async_save",)),
    ("bridge", ALONE, named("nemotron-h-56b"),
     ("trust_remote_code=True)", "which the program runs"), ()),
    ("bridge", LAYOUT, {}, (), ("trust_remote_code",)),
    # Bridge's providers make shared experts of width 0 else, and fuse no other activation
    ("bridge@0.6", ALONE, named("ernie-4.5-300b-a47b"),
     ("moe_shared_expert_intermediate_size = None", "bias_activation_fusion = True"), ()),
    ("bridge@0.6", ALONE, named("ernie-4.5-21b-a3b"), ("bias_activation_fusion = True",),
     ("moe_shared_expert_intermediate_size",)),
    ("bridge@0.6", ALONE, named("gemma-4-26b-a4b"), (),
     ("moe_shared_expert_intermediate_size", "bias_activation_fusion = True")),
    ("deepspeed", LAYOUT, {}, ("config = HfDeepSpeedConfig(whole)",), (ONE_GROUP,)),
    ("deepspeed", {**LAYOUT, "zero": 2}, {}, (), ("HfDeepSpeedConfig",)),
    ("deepspeed", {**LAYOUT, "ep": 1}, named("dots.llm1", 256), (ONE_GROUP,), ()),
    ("transformers", LAYOUT, named("dots.llm1", 256), (ONE_GROUP,), ()),
    ("transformers", LAYOUT, {}, ('experts_implementation="grouped_mm",',),
     ("n_group", "Mxfp4", "fsdp_plan")),
    # published weights in four bits are dequantized
    ("transformers", {**LAYOUT, "dp": 64}, named("gpt-oss-20b"),
     ("quantization_config=Mxfp4Config(dequantize=True),",
      "import AutoModelForCausalLM, Mxfp4Config, Trainer"), ()),
    ("transformers", {**LAYOUT, "ep": 1}, named("dbrx", 256),
     ('"transformer.blocks.*": "free_full_weight",\n',
      "Not expressed: the kernel grouped_mm, which the experts of dbrx do not call"),
     ("experts_implementation",)),
    # planned for another target
    ("megatron", LAYOUT, {"target": "torchtitan"}, ("Planned for torchtitan",), ()),
    # the language model of a configuration with towers
    ("bridge@0.6", {**ALONE, "edp": 64}, {**named("qwen3.5-27b"), "global_batch": 256},
     ("\n# It trains the language model alone, without its vision.\n",
      "\n    text = AutoConfig.from_pretrained('Qwen/Qwen3.5-27B').text_config\n",
      "\n    text.architectures = ['Qwen3_5ForCausalLM']\n",
      "\n    bridge = AutoBridge.from_hf_config(text)\n"), ()),
    # DeepSpeed's launcher gets the nodes and the data
    ("deepspeed", LAYOUT, {},
     ('\ndeepspeed --hostfile "${HOSTFILE:?', "ssh reaches all 32",
      "--num_nodes 32 --num_gpus 8 deepspeed_layout.py --data"), ()),
    ("deepspeed", {**LAYOUT, "dp": 4, "ep": 1}, named("olmoe", 4),
     ("\ndeepspeed --num_gpus 4 deepspeed_layout.py", "Start it on one node of 4 GPUs",
      'default="allenai/OLMoE'), ()),
    # what a target has no key for
    *((to, {**LAYOUT, "dp": 1024}, DEEPSEEK, ("Not expressed: multi-token prediction",), ())
      for to in ("transformers", "deepspeed", "torchtitan")),
    ("moetune", {**LAYOUT, "zero": 1, "dp": 128, "pp": 8}, DEEPSEEK, ("Not expressed: pp 8",), ()),
)  # fmt: skip


@pytest.mark.parametrize(("to", "layout", "inputs", "present", "absent"), ROWS)
def test_an_export_has_what_the_runtime_needs_and_no_more(
    tmp_path: Path, to: str, layout: dict[str, Any], inputs: dict[str, Any],
    present: tuple[str, ...], absent: tuple[str, ...],
) -> None:  # fmt: skip
    narrow = {"profile": "b200-x8"} if "dtype" in inputs else {}
    export = exported(tmp_path, to, plan_document(layout, QWEN | inputs | narrow))
    text = f"{export.text}\n{export.launch}"
    assert [word for word in present if word not in text] == []
    assert [word for word in absent if word in text] == []


@pytest.mark.parametrize(("overlap", "connections"), [("none", 1), ("batch", 32)])
def test_bridge_has_as_many_connections(tmp_path: Path, overlap: str, connections: int) -> None:
    script = exported(tmp_path, "bridge", plan_document({**PIPELINE, "overlap": overlap}))
    assert f" CUDA_DEVICE_MAX_CONNECTIONS={connections} torchrun" in script.launch


def test_a_plan_without_room_says_so(tmp_path: Path) -> None:
    document = plan_document(LAYOUT) | {"fits": False, "id": "feed1234" * 8}
    text = exported(tmp_path, "megatron", {"schema": "moetune.error/1", "plan": document}).text
    assert "does not fit" in text
    assert "feed12" in text
