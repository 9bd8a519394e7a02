"""transformers' own distribution of a small model of the family, and one step of it.

The program that `export` wrote is loaded, its `DistributedConfig` and `TrainingArguments` are made,
and a model with two layers, and the real numbers of heads and experts, is distributed by it over a
fake process group of all ranks; rank 0 runs a forward and a backward pass and AdamW. Each block is
sharded by itself, and what rank 0 loaded is its part of the checkpoint.
"""

import os
import re
import sys
import tempfile
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from common import judge_all  # type: ignore[import-not-found]
from small_models import small_config  # type: ignore[import-not-found]

CHECKPOINTS = tempfile.TemporaryDirectory()
WEIGHTS: dict[str, dict[str, Any]] = {}
"""Of each checkpoint that was made, in one piece."""


def prepare() -> None:
    """Let exchanges of a fake process group return what they were given."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    from transformers.distributed import expert_parallel

    def same_sizes(received: torch.Tensor, sent: torch.Tensor, **_: object) -> None:
        received.copy_(sent)

    expert_parallel.all_to_all_single = same_sizes


def check(job: dict[str, Any]) -> None:
    """Run a step of the small model as rank 0 of all ranks."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks = job["plan"]["inputs"]["world_size"]
    os.environ.update(MODEL="/nowhere", DATA="/nowhere", WORLD_SIZE=str(ranks), RANK="0",
                      LOCAL_RANK="0")  # fmt: skip
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        step(module_of(job["text"]), job)
    finally:
        dist.destroy_process_group()


def module_of(text: str) -> ModuleType:
    """Return the exported program as a module."""
    module = ModuleType("exported")
    exec(compile(text, "transformers_layout.py", "exec"), module.__dict__)  # noqa: S102
    return module


def checkpoint(job: dict[str, Any]) -> str:
    """Return the folder of a small model of the family, made once for each model."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = Path(CHECKPOINTS.name, job["plan"]["inputs"]["model"])
    if not folder.exists():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small_config(job["config"]))
        model.save_pretrained(folder)
        WEIGHTS[str(folder)] = {
            name: value.detach().float() for name, value in model.named_parameters()
        }
    return str(folder)


def step(module: Any, job: dict[str, Any]) -> None:
    """Make the arguments, distribute the model and run one step of it."""
    import torch
    from torch.distributed.tensor import DTensor

    layout, inputs = job["plan"]["layout"], job["plan"]["inputs"]
    with tempfile.TemporaryDirectory() as folder:
        given = module.training_arguments(folder)
    sequences = given.per_device_train_batch_size * given.gradient_accumulation_steps
    assert sequences * layout["dp"] == inputs["global_batch"]
    module.MODEL = checkpoint(job)
    model = module.load_model()
    if layout["dp"] > 1:
        check_blocks(model)
    check_weights(model, WEIGHTS[module.MODEL])
    if given.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    ids = torch.randint(0, 1000, (1, 32))
    with torch.autocast("cpu", torch.bfloat16, enabled=given.bf16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    if layout["dp"] * layout["tp"] > 1:
        assert any(isinstance(value, DTensor) for value in model.parameters())


def check_blocks(model: Any) -> None:
    """Check that FSDP gathers one block after another, and not the whole model."""
    import torch
    from torch.distributed.fsdp import FSDPModule

    lists = [part for name, part in model.named_modules()
             if isinstance(part, torch.nn.ModuleList) and not re.search(r"\d", name)]  # fmt: skip
    assert lists, "no blocks"
    whole = [type(block).__name__ for part in lists for block in part
             if not isinstance(block, FSDPModule)]  # fmt: skip
    assert not whole, f"FSDP gathers {whole} with the root"


def check_weights(model: Any, whole: dict[str, Any]) -> None:
    """Check that rank 0 has its part of each weight, which is the first one in each direction."""
    import torch
    from torch.distributed.tensor import DTensor

    for name, value in model.named_parameters():
        mine = value.to_local() if isinstance(value, DTensor) else value
        part = whole[name][tuple(slice(size) for size in mine.shape)]
        assert torch.equal(mine, part), f"loading puts other weights into {name}"


prepare()
judge_all(check)
