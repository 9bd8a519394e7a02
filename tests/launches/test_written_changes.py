"""Changes written into files of users: keys that are lacking are added, and all else stays."""

import difflib
from pathlib import Path
from typing import Any

import pytest

from moetune.domain.errors import InputError
from moetune.launches.files import open_launch, read_again
from moetune.launches.reading import Asked

SIZED = ("--max_seq_length", "4096", "--per_device_train_batch_size", "1")
TOML = """\
# mine
[parallelism]
tensor_parallel_degree = 2  # of a node
module_fqns_per_model_part = [
    ["a"],  # kept
]

[training]
local_batch_size = 1
seq_len = 4096
"""
JSON = """\
{
  "train_micro_batch_size_per_gpu": 1,
  "gradient_accumulation_steps": 8,
  "bf16": {"enabled": true}
}
"""
YAML = """\
MODEL_ARGS:
  --hidden-size: 2048
  --num-layers: 16
  --num-attention-heads: 16
  --num-experts: 64
  --moe-ffn-hidden-size: 1024
  --moe-router-topk: 8
  --swiglu: true
  --untie-embeddings-and-output-weights: true
  --seq-length: 4096  # long
  --micro-batch-size: 1
  --global-batch-size: 64
"""
SHARDED = """\
distributed_type: FSDP  # of accelerate
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_version: 2
  fsdp_transformer_layer_cls_to_wrap:
    - OlmoeDecoderLayer
num_processes: 16
"""
SIZES = """\
parallelism_config:
  parallelism_config_tp_size: 1  # of a node
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 8
"""
REPLICAS = "deepspeed_config: {}\ndistributed_type: 'MULTI_GPU'\nnum_processes: 16\n"
ENGINE = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\nnum_processes: 16\n"
BRIDGE = """\
torchrun --nproc-per-node 8 run.py --recipe olmoe_7b_pretrain_config \\
    model.tensor_model_parallel_size=2 train.micro_batch_size=1 \\
    train.global_batch_size=64 model.seq_length=4096
"""
TITAN = """\
torchrun -m torchtitan.train --parallelism.tensor_parallel_degree 2 \\
    --training.local_batch_size 1 --training.seq_len 4096
"""
PROGRAM = """\
def recipe(cfg):
    cfg.model.tensor_model_parallel_size = 2; cfg.model.seq_length = 4096
    cfg.train = TrainingConfig(micro_batch_size=1, global_batch_size=64)
"""


@pytest.mark.parametrize(
    ("name", "text", "change", "added"),
    [
        ("a.toml", TOML, {"ep": 4}, "+expert_parallel_degree = 4"),
        ("a.toml", TOML.partition("[parallelism]")[0] + "[training]\nlocal_batch_size = 1\n"
         "seq_len = 4096\n", {"ep": 4}, "+\n+[parallelism]\n+expert_parallel_degree = 4"),
        ("a.toml", TOML, {"recompute": ("full",)}, '+\n+[activation_checkpoint]\n+mode = "full"'),
        ("b.json", JSON, {"zero": 2}, '+  "zero_optimization": {"stage": 2},'),
        ("b.json", JSON.replace(",\n  ", ", ").replace("{\n  ", "{"), {"zero": 2},
         ('-{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8, '
         '"bf16": {"enabled": true}\n+{"train_micro_batch_size_per_gpu": 1, '
         '"gradient_accumulation_steps": 8, "zero_optimization": {"stage": 2}, '
         '"bf16": {"enabled": true}')),
        ("c.yaml", YAML, {"ep": 4}, "+  --expert-model-parallel-size: 4"),
        ("c.yaml", YAML, {"recompute": ("full",)},
         ('+  --moe-grouped-gemm: true\n+  --recompute-num-layers: 1\n'
          '+  --recompute-method: "uniform"\n'
         '+  --recompute-granularity: "full"')),
        ("c.yaml", YAML, {"micro_batch": 2}, "-  --micro-batch-size: 1\n+  --micro-batch-size: 2"),
        ("d.sh", BRIDGE, {"ep": 4},
         ("-    model.tensor_model_parallel_size=2 train.micro_batch_size=1 \\\n"
         "+    model.tensor_model_parallel_size=2 model.expert_model_parallel_size=4 "
         "train.micro_batch_size=1 \\")),
        ("e.sh", TITAN, {"ep": 4},
         ("-torchrun -m torchtitan.train --parallelism.tensor_parallel_degree 2 \\\n"
         "+torchrun -m torchtitan.train --parallelism.tensor_parallel_degree 2 "
         "--parallelism.expert_parallel_degree 4 \\")),
        ("e.sh", TITAN, {"recompute": ("full",)},
         ("-torchrun -m torchtitan.train --parallelism.tensor_parallel_degree 2 \\\n"
         "+torchrun -m torchtitan.train --parallelism.tensor_parallel_degree 2 "
         "--activation_checkpoint.mode full \\")),
        ("f.py", PROGRAM, {"zero": 1}, "+    cfg.ddp.use_distributed_optimizer = True"),
        ("g.yaml", SHARDED, {"recompute": ("full",)},
         ("-  fsdp_activation_checkpointing: false\n+  fsdp_activation_checkpointing: true")),
        ("g.yaml", SHARDED, {"tp": 2, "dp": 8},
         ("+parallelism_config:\n+  parallelism_config_tp_size: 2\n"
          "+  parallelism_config_dp_shard_size: 8")),
        ("g.yaml", SHARDED + SIZES, {"tp": 2, "dp": 8},
         ("-  parallelism_config_tp_size: 1  # of a node\n"
          "-  parallelism_config_dp_replicate_size: 2\n"
          "+  parallelism_config_tp_size: 2  # of a node")),
        ("g.yaml", REPLICAS, {"zero": 3},
         ("-deepspeed_config: {}\n-distributed_type: 'MULTI_GPU'\n"
          '+deepspeed_config:\n+  zero_stage: 3\n+distributed_type: "DEEPSPEED"')),
        ("g.yaml", ENGINE, {"zero": 1}, "-  zero_stage: 3\n+  zero_stage: 1"),
        ("g.yaml", ENGINE, {"zero": 0},
         ('-distributed_type: DEEPSPEED\n+distributed_type: "MULTI_GPU"\n-  zero_stage: 3')),
    ],
)  # fmt: skip
def test_a_key_is_added_where_it_belongs_and_nothing_else_is_touched(
    name: str, text: str, change: dict[str, Any], added: str
) -> None:
    extra = SIZED if name in ("b.json", "g.yaml") else ()
    launch = open_launch(name, text, Asked(model="olmoe", world_size=16, extra=extra))
    wanted = launch.reading.layout.changed(**change)
    changes = launch.changes(wanted, ())
    copy = launch.written(changes)
    assert " ".join(copy.words) in launch.words(changes)
    decoder, again = launch.reading.decoder, read_again(launch, copy).reading
    assert again.layout.explicit(decoder) == wanted.explicit(decoder)
    assert again.job == launch.reading.job
    lines = difflib.unified_diff(text.splitlines(), copy.text.splitlines(), n=0, lineterm="")
    assert "\n".join(line for line in lines if line[:2] not in ("--", "++", "@@")) == added
    assert copy.words == (("--gradient_accumulation_steps", "2") if change.get("tp") else ())


@pytest.mark.parametrize(
    ("name", "text", "change"),
    [
        ("g.yaml", SHARDED, {"ep": 4}),  # of the program's DistributedConfig
        ("g.yaml", ENGINE, {"ep": 4}),  # of DeepSpeed's own file
    ],
)
def test_a_key_that_has_no_place_is_written_by_hand(
    name: str, text: str, change: dict[str, Any]
) -> None:
    launch = open_launch(name, text, Asked(model="olmoe", world_size=16, extra=SIZED))
    with pytest.raises(InputError, match=r"write .*by hand"):
        launch.written(launch.changes(launch.reading.layout.changed(**change), ()))


@pytest.mark.parametrize(
    ("name", "text", "change", "words"),
    [
        ("b.json", JSON, {"recompute": ("full",)}, ("--gradient_checkpointing", "true")),
        ("g.yaml", ENGINE, {"recompute": ("full",)}, ("--gradient_checkpointing", "true")),
        ("g.yaml", SHARDED, {"micro_batch": 2},
         ("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4")),
    ],
)  # fmt: skip
def test_what_the_command_of_a_file_says_is_left_to_the_command(
    name: str, text: str, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    steps = () if name == "b.json" else ("--gradient_accumulation_steps", "8")
    asked = Asked(model="olmoe", world_size=16, extra=(*SIZED, *steps))
    launch = open_launch(name, text, asked)
    wanted = launch.reading.layout.changed(**change)
    copy = launch.written(launch.changes(wanted, ()))
    assert copy == (text, words)
    assert read_again(launch, copy).reading.layout.explicit(
        launch.reading.decoder
    ) == wanted.explicit(launch.reading.decoder)


def test_accelerate_loads_a_copy_with_the_change_and_all_that_was_there(tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    launch = open_launch("g.yaml", SHARDED, Asked(model="olmoe", extra=SIZED))
    wanted = launch.reading.layout.changed(tp=2, dp=8, recompute=("full",))
    file = tmp_path / "copy.yaml"
    file.write_text(launch.written(launch.changes(wanted, ())).text)
    loaded = config_args.load_config_from_file(str(file))
    sizes = {"parallelism_config_tp_size": 2, "parallelism_config_dp_shard_size": 8}
    assert loaded.parallelism_config == sizes
    assert loaded.fsdp_config == {
        "fsdp_activation_checkpointing": True, "fsdp_version": 2,
        "fsdp_transformer_layer_cls_to_wrap": ["OlmoeDecoderLayer"],
    }  # fmt: skip
    assert (loaded.num_processes, loaded.distributed_type.value) == (16, "FSDP")
