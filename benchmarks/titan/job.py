"""One rank of the benchmark: torchtitan's trainer, run after run, with the same seed.

Runs are read as JSON from the first argument; each rank writes what they gave into the folder that
is the second.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.titan import cpu  # first: it makes the CPU torchtitan's device

# isort: split
from torchtitan.config import Configurable
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug

from benchmarks.titan.parts import Bytes, Records, Text

MODELS = {"qwen3": qwen3_moe_debug, "deepseek_v3": deepseek_v3_debugmodel}
CHECKPOINTING = {"none": None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}
MOETUNE = "moetune.adapters.torchtitan.routed_experts"
SHARED = "moetune.adapters.torchtitan.moe_with_shared_experts"


def configuration(run: dict[str, Any]) -> Configurable.Config:
    """Return a debug model's own configuration, made small, with this run's overrides."""
    config = MODELS[run["model"]]()
    config.dataloader, config.tokenizer = Text.Config(), Bytes.Config()
    config.metrics = Records.Config(log_freq=1, disable_color_printing=True)
    training, parallelism = config.training, config.parallelism
    training.disable_cuda_graphs = True
    training.local_batch_size, training.seq_len = run["batch"], run["seq_len"]
    training.steps, training.mixed_precision_param = run["steps"], run["dtype"]
    parallelism.expert_parallel_degree = run["ep"]
    parallelism.tensor_parallel_degree = run.get("tp", 1)
    parallelism.spmd_backend = "partial_dtensor"  # fully_shard of torch 2.13 refuses the default
    config.checkpoint.enable = False
    config.dump_folder = sys.argv[2]
    config.comm.init_timeout_seconds = config.comm.train_timeout_seconds = 3600  # a busy machine's
    config.debug.seed = 1
    config.debug.enable_structured_logging = False
    config.activation_checkpoint = CHECKPOINTING[run.get("checkpointing", "none")]
    spec, make = config.model_spec, config.model_spec.parallelize_fn
    spec.model.layers = spec.model.layers[: run["layers"]]
    config.model_spec = dataclasses.replace(
        spec, parallelize_fn=lambda model, **options: cpu.sum_gradients(make(model, **options))
    )
    config.override.imports = ["benchmarks.titan.parts.plain_attention"]
    if run["exchange"] == "moetune":
        override = SHARED if run.get("shared") else MOETUNE
        config.override.imports.append((override, {"plan": run.get("plan")}))
    elif run["dtype"] == "float32":
        config.override.imports.append("benchmarks.titan.parts.float32_experts")
    return config


def main() -> None:
    """Train every run, and write its losses and times."""
    torch.set_num_threads(1)
    found = []
    for run in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        trainer = configuration(run).build()
        trainer.train()
        records = trainer.metrics_processor
        names = sorted(name for name, _ in trainer.model_parts[0].named_parameters())
        trainer.close()
        found.append({
            **run, "losses": records.losses, "norms": records.norms, "seconds": records.seconds,
            "names": names,
        })  # fmt: skip
        path = Path(sys.argv[2]) / f"rank-{dist.get_rank()}.json"
        path.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


main()
