"""Configurations of torchtitan, Bridge, DeepSpeed, accelerate and the Trainer as users write."""

from pathlib import Path
from typing import Any

import pytest

from moetune.domain.errors import InputError
from moetune.launches.entries import entries_of
from moetune.launches.files import open_launch
from moetune.launches.reading import Asked

TITAN = """\
[model]
name = "deepseek_v3"
flavor = "16B"   # of the registry

[training]
local_batch_size = 4
seq_len = 4096

[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
expert_parallel_degree = 8

[activation_checkpoint]
mode = "full"
"""
TITAN_WORDS = """\
torchrun --nproc_per_node=8 -m torchtitan.train --module deepseek_v3 \\
    --training.local_batch_size 8 --training.seq_len=4096 --training.global_batch_size 64 \\
    --parallelism.pipeline_parallel_degree 2 --parallelism.expert_parallel_degree 4 \\
    --parallelism.pipeline_parallel_schedule 1F1B --activation_checkpoint.mode none
"""
BRIDGE = """\
NODES=2
torchrun --nnodes $NODES --nproc-per-node 8 pretrain.py --recipe qwen3_30b_a3b_pretrain_config \\
    model.tensor_model_parallel_size=2 model.expert_model_parallel_size=8 \\
    model.expert_tensor_parallel_size=1 model.sequence_parallel=true model.seq_length=4096 \\
    train.micro_batch_size=1 train.global_batch_size=128 ddp.use_distributed_optimizer=true
"""
RECIPE = """\
from megatron.bridge.recipes.qwen import qwen3_30b_a3b_pretrain_config

cfg = qwen3_30b_a3b_pretrain_config()
cfg.model.tensor_model_parallel_size = 1
cfg.model.pipeline_model_parallel_size = 2
cfg.model.virtual_pipeline_model_parallel_size = 4
cfg.model.expert_model_parallel_size = 8
cfg.model.seq_length = 8192
cfg.train.micro_batch_size = 1
cfg.train.global_batch_size = 64
cfg.comm_overlap.overlap_moe_expert_parallel_comm = True
"""
REGISTRY = """\
from . import model_registry
WIDE = 8

def moe_30b() -> Trainer.Config:
    model_spec = model_registry("30B-A3B")
    return Trainer.Config(
        model_spec=model_spec,
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=2 * 4096, max_context_length=4096),
        parallelism=ParallelismConfig(data_parallel_shard_degree=-1, expert_parallel_degree=4),
        activation_checkpoint=FullAC.Config(),
    )

def moe_30b_wide() -> Trainer.Config:
    config = moe_30b()
    config.parallelism.expert_parallel_degree = WIDE
    return config
"""
RECIPES = """\
ID = "Qwen/Qwen3-30B-A3B"
def qwen3_30b_a3b_pretrain_16gpu_config():
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained(ID).to_megatron_provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.expert_model_parallel_size = 4
    cfg.model.expert_tensor_parallel_size = 1
    return cfg

def qwen3_30b_a3b_pretrain_32gpu_config():
    cfg = qwen3_30b_a3b_pretrain_16gpu_config()
    cfg.model.tensor_model_parallel_size = 2
    cfg.train.micro_batch_size = 1
    return cfg

def qwen3_30b_a3b_peft_8gpu_config():
    cfg = qwen3_30b_a3b_pretrain_16gpu_config()
    cfg.peft = default_peft_config("dora")
    return cfg

LENGTH: int = 16384
def qwen3_30b_a3b_lora_8gpu_config(peft_scheme: str | PEFT = "lora"):
    cfg = qwen3_30b_a3b_pretrain_16gpu_config()
    cfg.peft = default_peft_config(peft_scheme)
    cfg.model.seq_length = LENGTH
    cfg.dataset.seq_length = cfg.model.seq_length
    cfg.recompute_modules = None
    return cfg
"""
NEMO = """\
def trainer(pipeline=4, virtual=8, experts: int = 8, *, num_nodes: int = 8, fsdp=False):
    strategy = run.Config(nl.MegatronStrategy, pipeline_model_parallel_size=pipeline,
                          virtual_pipeline_model_parallel_size=virtual,
                          expert_model_parallel_size=experts)
    if fsdp:
        strategy.pipeline_model_parallel_size = 1
    return run.Config(nl.Trainer, devices=8, num_nodes=num_nodes, strategy=strategy)

def pretrain_recipe(num_nodes=4):
    return run.Partial(pretrain, trainer=trainer(experts=4, num_nodes=num_nodes), data=run.Config(
        MockDataModule, seq_length=4096, global_batch_size=512, micro_batch_size=1))
"""
FACTORY = """\
model_name_or_path: Qwen/Qwen3-30B-A3B
finetuning_type: full
stage: sft
deepspeed: examples/ds_z3.json
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
"""
DEEPSPEED = """\
{
  "train_batch_size": 64,
  "train_micro_batch_size_per_gpu": 2,
  "gradient_accumulation_steps": 2,
  "bf16": {"enabled": true},
  "expert_parallel": {"enabled": true, "autoep_size": 8},
  "zero_optimization": {
    "stage": 2,
    "overlap_comm": false
  }
}
"""
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2          # fully_shard
  fsdp_activation_checkpointing: true
  fsdp_transformer_layer_cls_to_wrap:
    - Qwen3MoeDecoderLayer
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""
SIZES = """\
fsdp_config:
  fsdp_version: {version}
parallelism_config:
  parallelism_config_dp_replicate_size: {copies}
  parallelism_config_dp_shard_size: {shards}
  parallelism_config_tp_size: {tp}
"""
TRAINER = """\
{"model_name_or_path": "Qwen/Qwen3-8B", "per_device_train_batch_size": 2,
 "gradient_accumulation_steps": 4,
 "gradient_checkpointing": true,
 "max_seq_length": 4096, "bf16": true}
"""
MEGATRON = """\
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --tensor-model-parallel-size: ${TP}
  --sequence-parallel: true
  --num-layers: 48
  --hidden-size: 2048
  --num-attention-heads: 32
  --kv-channels: 128
  --group-query-attention: true
  --num-query-groups: 4
  --num-experts: 128
  --moe-ffn-hidden-size: 768
  --moe-router-topk: 8
  --moe-router-pre-softmax: false   # as Qwen3
  --untie-embeddings-and-output-weights: true
  --micro-batch-size: 1
  --seq-length: 4096
  --recompute-granularity: selective
  --recompute-modules: moe_act layernorm
"""
BATCH = ("--max_seq_length", "4096", "--per_device_train_batch_size", "1")
ROWS: tuple[tuple[str, str, dict[str, Any], str, dict[str, Any], int], ...] = (
    ("run.toml", TITAN, {"world_size": 64}, "torchtitan",
     {"dp": 32, "tp": 2, "ep": 8, "micro_batch": 4, "zero": 3, "recompute": ("full",)}, 128),
    ("run.sh", TITAN_WORDS, {"model": "deepseek-v2-lite"}, "torchtitan",
     {"dp": 4, "pp": 2, "vpp": 1, "ep": 4, "micro_batch": 1, "zero": 2, "recompute": ()}, 64),
    ("run.sh", BRIDGE, {"model": "qwen3-30b-a3b"}, "bridge",
     {"dp": 8, "tp": 2, "ep": 8, "etp": 1, "zero": 1, "dispatcher": "all_to_all"}, 128),
    ("run.py", RECIPE, {"world_size": 16}, "bridge",
     {"dp": 8, "pp": 2, "vpp": 4, "ep": 8, "overlap": "batch"}, 64),
    ("r.py", REGISTRY, {"world_size": 16, "extra": ("moe_30b",)}, "torchtitan",
     {"dp": 16, "ep": 4, "micro_batch": 2, "zero": 3, "recompute": ("full",)}, 32),
    ("r.py", REGISTRY, {"world_size": 16, "extra": ("moe_30b_wide",)}, "torchtitan",
     {"dp": 16, "ep": 8, "micro_batch": 2}, 32),
    ("q.py", RECIPES, {"extra": ("qwen3_30b_a3b_pretrain_16gpu_config",)}, "bridge",
     {"dp": 4, "tp": 4, "ep": 4, "etp": 1, "micro_batch": 2, "zero": 1}, 32),
    ("q.py", RECIPES, {"extra": ("qwen3_30b_a3b_pretrain_32gpu_config",
                                 "train.global_batch_size=512")},
     "bridge", {"dp": 16, "tp": 2, "ep": 4, "micro_batch": 1}, 512),
    ("n.py", NEMO, {"model": "mixtral-8x7b", "extra": ("pretrain_recipe",)}, "megatron",
     {"dp": 8, "pp": 4, "vpp": 8, "ep": 4, "micro_batch": 1, "zero": 1}, 512),
    ("f.yaml", FACTORY, {"world_size": 8}, "deepspeed", {"dp": 8, "zero": 3, "recompute": ()}, 16),
    ("ds.json", DEEPSPEED, {"world_size": 16, "model": "qwen3-30b-a3b", "extra": BATCH[:2]},
     "deepspeed", {"dp": 16, "ep": 8, "zero": 2, "micro_batch": 2, "recompute": ()}, 64),
    ("fsdp.yaml", ACCELERATE, {"model": "qwen3-30b-a3b", "extra": BATCH}, "transformers",
     {"dp": 16, "zero": 3, "micro_batch": 1, "recompute": ("full",)}, 16),
    ("args.json", TRAINER, {"world_size": 8}, "transformers",
     {"dp": 8, "micro_batch": 2, "recompute": ("full",)}, 64),
    ("args.yaml", MEGATRON, {"world_size": 16, "values": {"TP": "2"}}, "megatron",
     {"dp": 8, "tp": 2, "etp": 2, "recompute": ("moe_act", "norm")}, 8),
)  # fmt: skip


@pytest.mark.parametrize(("name", "text", "asked", "target", "layout", "batch"), ROWS)
def test_a_configuration_is_read_as_it_would_run(
    name: str, text: str, asked: dict[str, Any], target: str, layout: dict[str, Any], batch: int
) -> None:
    reading = open_launch(name, text, Asked(**asked)).reading
    assert reading.target.name == target
    assert {key: getattr(reading.layout, key) for key in layout} == layout
    assert reading.job.global_batch == batch
    for row in reading.rows:
        if row.line and text != REGISTRY:  # whose keys are read from others
            line = text.splitlines()[row.line - 1].replace("-", "_")
            assert row.key.rpartition(".")[2].replace("-", "_") in line


@pytest.mark.parametrize(
    ("name", "text", "asked", "key", "value", "line"),
    [
        ("run.toml", TITAN, {"world_size": 64}, "expert_parallel_degree", 16, 12),
        ("run.py", RECIPE, {"world_size": 16}, "expert_model_parallel_size", 4, 7),
        ("ds.json", DEEPSPEED, {"world_size": 16, "model": "olmoe", "extra": BATCH[:2]},
         "zero_optimization.stage", 3, 8),
    ],
)  # fmt: skip
def test_a_written_change_touches_its_line_alone(
    name: str, text: str, asked: dict[str, Any], key: str, value: int, line: int
) -> None:
    launch = open_launch(name, text, Asked(**asked))
    new = launch.written({key: value}).text.splitlines()
    old = text.splitlines()
    assert [number for number, pair in enumerate(zip(old, new, strict=True), start=1)
            if pair[0] != pair[1]] == [line]  # fmt: skip
    leaf = key.rpartition(".")[2]
    assert str(value) in new[line - 1]
    assert leaf in new[line - 1]
    with pytest.raises(InputError, match="stands in no line of the file"):
        launch.written({"cp_size": 2})


@pytest.mark.parametrize(
    ("name", "text", "asked", "message"),
    [
        ("x.json", '{"stage": 1, "stage": 2}', {}, '"stage" is given twice'),
        ("x.json", '{"stage": 1', {}, "x.json is no JSON"),
        ("x.toml", "a = 1\na = 2", {}, "x.toml is no TOML"),
        ("x.yaml", "a: 1\nb: 2\na: 3", {}, "line 3: a is given twice"),
        ("x.yaml", "a: 1\n\tb: 2", {}, "line 2 is no YAML"),
        ("x.py", "a = (", {}, "x.py is no Python"),
        ("x.json", '{"colour": "red"}', {}, "x.json is of no kind that is known"),
        ("x.sh", "echo \0", {}, "x.sh is no text"),
        ("x.sh", "#" * (2**20 + 1), {}, "x.sh is larger than 1 MiB"),
        ("run.toml", TITAN, {}, "does not say how many ranks there are"),
        ("ds.json", DEEPSPEED, {"world_size": 16, "extra": BATCH[:2]}, "does not name its model"),
        ("ds.json", DEEPSPEED, {"world_size": 16}, "nothing says the tokens of a sequence"),
        ("run.sh", BRIDGE.replace("a3b", "a9b"), {}, "names no recipe that is known"),
        ("r.py", REGISTRY, {"world_size": 8}, "r.py has 2 functions that make a configuration"),
        ("r.py", REGISTRY, {"extra": ("moe_3b",)}, "r.py has no function 'moe_3b'"),
        ("q.py", RECIPES, {"extra": ("qwen3_30b_a3b_peft_8gpu_config",)}, "trains adapters"),
        ("run.sh", BRIDGE.replace("pretrain_c", "peft_c"), {}, "trains adapters"),
        (
            "f.yaml",
            FACTORY.replace(": full", ": freeze"),
            {"world_size": 8},
            "finetuning_type freeze trains in a way that is not read here",
        ),
    ],
)
def test_wrong_input_is_a_message(
    name: str, text: str, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as refused:
        open_launch(name, text, Asked(**asked))
    assert message in str(refused.value)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("name", "text", "key", "line", "severity"),
    [
        ("run.toml", TITAN, "expert_parallel_degree", 12, "stops"),
        ("run.py", RECIPE, "expert_model_parallel_size", 7, "stops"),
        ("ds.json", DEEPSPEED, "autoep_size", 6, "note"),
    ],
)
def test_a_misspelt_key_is_named_with_the_nearest_key(
    name: str, text: str, key: str, line: int, severity: str
) -> None:
    wrong = key.replace("l", "", 1) if "l" in key else key + "s"
    asked = Asked(world_size=64, model="qwen3-30b-a3b", extra=BATCH[:2])
    launch = open_launch(name, text.replace(key, wrong), asked)
    first = next(launch.problems(None))
    assert (first.line, first.severity) == (line, severity)
    assert wrong in first.what
    assert key in first.fix


def test_values_have_the_lines_of_their_keys() -> None:
    for name, text in (("a.json", DEEPSPEED), ("a.yaml", ACCELERATE), ("a.toml", TITAN)):
        for entry in entries_of(name, text):
            assert entry.path.rpartition(".")[2] in text.splitlines()[entry.line - 1]


FACTORY_SCRIPT = """\
export TOKENIZERS_PARALLELISM=false
{launcher} src/train.py \\
    --stage sft --do_train --finetuning_type full \\
    --model_name_or_path Qwen/Qwen3-30B-A3B --cutoff_len 2048 {engine} \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps ${{STEPS:-4}} --bf16
"""
STAGE_2 = '{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}'
MULTI = "distributed_type: {kind}\nmixed_precision: bf16\nnum_processes: 16\n"


@pytest.mark.parametrize(
    ("launcher", "engine", "ranks", "zero", "target"),
    [
        ("deepspeed --num_gpus 8", "--deepspeed ds.json", 8, 2, "deepspeed"),
        ("deepspeed", "--deepspeed ds.json", 4, 2, "deepspeed"),
        ("deepspeed --num_nodes 2 --num_gpus 8", "--deepspeed none.json", 16, 3, "deepspeed"),
        ("torchrun --nproc_per_node 8", "", 8, 0, "deepspeed"),
        ("torchrun --nproc_per_node 8", '--fsdp "full_shard"', 8, 3, "transformers"),
        ("accelerate launch --config_file fsdp.yaml", "", 16, 3, "transformers"),
        ("accelerate launch --config_file ddp.yaml", "", 16, 0, "deepspeed"),
        ("accelerate launch --num_processes 8 -m", "--fsdp full_shard", 8, 3, "transformers"),
    ],
)
def test_a_script_of_the_trainer_is_read_with_the_files_that_it_names(
    tmp_path: Path, launcher: str, engine: str, ranks: int, zero: int, target: str
) -> None:
    (tmp_path / "ds.json").write_text(STAGE_2)
    (tmp_path / "fsdp.yaml").write_text(MULTI.format(kind="FSDP"))
    (tmp_path / "ddp.yaml").write_text(MULTI.format(kind="MULTI_GPU"))
    text = FACTORY_SCRIPT.format(launcher=launcher, engine=engine)
    launch = open_launch("run.sh", text, Asked(folder=tmp_path, devices_per_node=4))
    reading = launch.reading
    assert (reading.target.name, reading.layout.zero) == (target, zero)
    assert (reading.layout.dp, reading.layout.micro_batch, reading.job.length) == (ranks, 2, 2048)
    assert reading.job.global_batch == 2 * 4 * ranks
    remarks = [problem.what for problem in reading.problems]
    assert any("no engine shards states" in what for what in remarks) is (zero == 0)
    assert any("none.json is not read" in what for what in remarks) is ("none.json" in engine)
    changed = launch.written({"train_micro_batch_size_per_gpu": 1})
    assert changed.text == text.replace("batch_size 2", "batch_size 1")


@pytest.mark.parametrize(
    ("text", "severity", "what"),
    [
        ("distributed_type: FSDP\n" + SIZES.format(version=2, copies=2, shards=8, tp=1), "note",
         "replicas that do not share shards"),
        ("distributed_type: FSDP\n" + SIZES.format(version=2, copies=1, shards=4, tp=2), "stops",
         "make 8 ranks, and 16 are started"),
        ("distributed_type: FSDP\n" + SIZES.format(version=1, copies=1, shards=8, tp=2), "stops",
         "parallelism_config needs FSDP2"),
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n", "note",
         "SHARD_GRAD_OP: priced as if all ranks shared all states"),
        ("distributed_type: FSDP\nfsdp_config:\n  fsdp_offload_params: true\n", "note",
         "states in host memory are not priced"),
        ("distributed_type: FSDP\nmixed_precision: fp16\n", "note", "priced as bfloat16"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: none.json\n",
         "note", "none.json is not read"),
        ("distributed_type: MULTI_GPU\n", "note", "no engine shards states"),
    ],
)  # fmt: skip
def test_what_accelerate_refuses_and_what_is_priced_as_something_else_is_said(
    text: str, severity: str, what: str
) -> None:
    asked = Asked(model="olmoe", world_size=16, extra=BATCH)
    (problem,) = open_launch("a.yaml", text, asked).problems(None)
    assert problem.severity == severity
    assert what in problem.what


@pytest.mark.parametrize(
    ("text", "zero", "recompute"),
    [
        ("distributed_type: DEEPSPEED\n", 2, ()),  # accelerate's usual stage
        ("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 1\n", 1, ()),
        ("distributed_type: 'NO'\nfsdp_config:\n  fsdp_version: 2\n", 0, ()),
        (("fsdp: full_shard\nper_device_train_batch_size: 1\nfsdp_config:\n"
          "  activation_checkpointing: true\n"), 3, ("full",)),
    ],
)  # fmt: skip
def test_an_engine_is_read_by_the_type_that_accelerate_starts(
    text: str, zero: int, recompute: tuple[str, ...]
) -> None:
    asked = Asked(model="olmoe", world_size=16, extra=BATCH)
    layout = open_launch("a.yaml", text, asked).reading.layout
    assert (layout.zero, layout.recompute) == (zero, recompute)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("distributed_type: FSDP\nparallelism_config:\n  parallelism_config_cp_size: 8\n",
         "not priced for accelerate"),
        ("distributed_type: MEGATRON_LM\n", "accelerate's keys of Megatron are not read"),
    ],
)  # fmt: skip
def test_what_is_not_read_of_accelerate_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_launch("a.yaml", text, Asked(model="olmoe", world_size=16, extra=BATCH))


def test_adapters_and_lengths_of_a_recipe_are_its_defaults() -> None:
    asked = Asked(extra=("qwen3_30b_a3b_lora_8gpu_config",))
    reading = open_launch("q.py", RECIPES, asked).reading
    assert reading.job.tuning.words == "lora:rank=32,targets=all,experts=shared"
    assert (reading.job.length, reading.job.world_size) == (16384, 8)


def test_words_that_a_script_does_not_pass_on_belong_to_its_command() -> None:
    text = BRIDGE.replace("train.micro_batch_size=1 ", "")
    with pytest.raises(InputError, match="nothing gives --micro-batch-size") as lacking:
        open_launch("run.sh", text, Asked(model="qwen3-30b-a3b"))
    assert lacking.value.hint == "give it, or add -- train.micro_batch_size=1"
    words = ("train.micro_batch_size=1", "model.tensor_model_parallel_size=1")
    reading = open_launch("run.sh", text, Asked(model="qwen3-30b-a3b", extra=words)).reading
    assert (reading.layout.micro_batch, reading.layout.tp) == (1, 1)
    assert reading.given["tensor_model_parallel_size"].line == 0


@pytest.mark.parametrize(
    ("model", "words", "engine", "tuning", "zero", "remark"),
    [
        ("Qwen/Qwen3-8B", "--finetuning_type lora", "ds3.json", "lora:rank=8,targets=all", 3, ""),
        ("Qwen/Qwen3-8B", "--finetuning_type lora", "ds2.json", "lora:rank=8,targets=all", 0, ""),
        ("Qwen/Qwen3-30B-A3B", "--stage sft --lora_rank 16", "ds3.json",
         "lora:rank=16,targets=attention", 3, "experts have no adapters"),
        ("Qwen/Qwen3-30B-A3B", ("--finetuning_type lora --quantization_bit 4 --lora_target "
         "q_proj,k_proj,v_proj,o_proj"), "ds2.json", "qlora:rank=8,targets=attention", 0, ""),
        ("mistralai/Mixtral-8x7B-v0.1", "--use_peft --lora_r 4 --lora_target_modules q_proj v_proj",
         "ds2.json", "lora:rank=4,targets=attention", 0, "adapters on q_proj, v_proj are priced"),
        ("mistralai/Mixtral-8x7B-v0.1", "--use_peft", "ds3.json",
         "lora:rank=16,targets=attention", 3, "adapters on q_proj, v_proj are priced"),
    ],
)  # fmt: skip
def test_adapters_of_the_trainers_commands_are_read(
    tmp_path: Path, model: str, words: str, engine: str, tuning: str, zero: int, remark: str
) -> None:
    for stage in (2, 3):
        (tmp_path / f"ds{stage}.json").write_text(STAGE_2.replace("2}", f"{stage}}}"))
    text = (
        f"torchrun --nproc_per_node 8 sft.py --model {model} {words} --max_length 2048 "
        f"--deepspeed {engine} --per_device_train_batch_size 1 "
        "--gradient_accumulation_steps $(expr 32 / 8)"
    )
    reading = open_launch("run.sh", text, Asked(folder=tmp_path)).reading
    assert reading.target.name == "transformers"
    assert reading.job.tuning.words.partition(",experts")[0] == tuning
    assert (reading.layout.zero, reading.layout.dp, reading.job.global_batch) == (zero, 8, 32)
    remarks = [problem.what for problem in reading.problems]
    of_adapters = [what for what in remarks if "adapters" in what]
    assert len(of_adapters) == bool(remark)
    assert all(what.startswith(remark) for what in of_adapters)


def test_a_key_that_a_command_cannot_have_is_left_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(STAGE_2)
    text = FACTORY_SCRIPT.format(launcher="deepspeed --num_gpus 8", engine="--deepspeed ds.json")
    launch = open_launch("run.sh", text, Asked(folder=tmp_path))
    row = next(row for row in launch.reading.rows if row.name == "zero")
    assert (row.key, row.file) == ("zero_optimization.stage", "ds.json")
    with pytest.raises(InputError, match=r"zero_optimization\.stage stands in ds\.json"):
        launch.written({"zero_optimization.stage": 3})
    plain = open_launch("run.sh", text.replace("--deepspeed ds.json", ""), Asked(folder=tmp_path))
    with pytest.raises(InputError, match=r"zero_optimization\.stage stands in no line of the file"):
        plain.written({"zero_optimization.stage": 3})


def test_files_that_name_each_other_are_read_once_and_no_large_file_is(tmp_path: Path) -> None:
    text = FACTORY_SCRIPT.format(launcher="deepspeed --num_gpus 8", engine="--deepspeed a.json")
    named = '{{"deepspeed": "{}", "zero_optimization": {{"stage": {}}}}}'
    (tmp_path / "a.json").write_text(named.format("b.json", 2))
    (tmp_path / "b.json").write_text(named.format("a.json", 1))
    launch = open_launch("run.sh", text, Asked(folder=tmp_path))
    assert launch.reading.layout.zero == 2  # of the file that names the other
    (tmp_path / "a.json").write_text(" " * (2**20 + 1))
    with pytest.raises(InputError, match=r"a\.json is larger than 1 MiB"):
        open_launch("run.sh", text, Asked(folder=tmp_path))


@pytest.mark.parametrize("extra", [("oops",), ("oops", "--seq-length", "8"), ("--bogus", "1")])
def test_words_that_nothing_reads_are_refused(extra: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=f"does not pass on {extra[0]} behind --"):
        open_launch("run.sh", BRIDGE, Asked(model="qwen3-30b-a3b", extra=extra))
