"""Changes written into files of users: keys that are lacking are added, and all else stays."""

import difflib
from typing import Any

import pytest

from moetune.domain.errors import InputError
from moetune.launches.files import open_launch
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
ACCELERATE = """\
distributed_type: FSDP
parallelism_config:
  parallelism_config_tp_size: 1
"""
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
    ],
)  # fmt: skip
def test_a_key_is_added_where_it_belongs_and_nothing_else_is_touched(
    name: str, text: str, change: dict[str, Any], added: str
) -> None:
    launch = open_launch(name, text, Asked(model="olmoe", world_size=16, extra=()
                         if name != "b.json" else SIZED))  # fmt: skip
    wanted = launch.reading.layout.changed(**change)
    copy = launch.written(launch.changes(wanted, ()))
    decoder = launch.reading.decoder
    assert launch.read_again(copy).reading.layout.explicit(decoder) == wanted.explicit(decoder)
    lines = difflib.unified_diff(text.splitlines(), copy.splitlines(), n=0, lineterm="")
    assert "\n".join(line for line in lines if line[:2] not in ("--", "++", "@@")) == added


@pytest.mark.parametrize(
    ("name", "text", "change"),
    [
        ("g.yaml", ACCELERATE, {"tp": 2, "dp": 8}),  # accelerate has other names of its keys
        ("b.json", JSON, {"recompute": ("full",)}),  # DeepSpeed would ignore it
    ],
)
def test_a_key_that_has_no_place_is_written_by_hand(
    name: str, text: str, change: dict[str, Any]
) -> None:
    launch = open_launch(name, text, Asked(model="olmoe", world_size=16, extra=SIZED))
    with pytest.raises(InputError, match=r"write .*by hand"):
        _ = launch.written(launch.changes(launch.reading.layout.changed(**change), ())).strip()
