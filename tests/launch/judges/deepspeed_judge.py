"""DeepSpeed's own reading of an exported program's configuration, and the program's own steps.

The launch line is parsed by DeepSpeed's launcher and the program. The whole configuration is parsed
for all ranks, each of its keys must have been read, and AutoEP's and AutoTP's checks are asked. The
program then loads a model with a few layers and the real numbers of heads and experts, makes its
engine and trains a step on one or two real ranks (gloo), ep and tp cut down to them.
"""

import copy
import importlib
import io
import os
import queue
import random
import re
import shlex
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))

from common import judge_all  # type: ignore[import-not-found]
from small_models import small_config  # type: ignore[import-not-found]

_SECONDS = 900.0
_PRELOADED = ("torch._inductor.compile_fx", "transformers.trainer", "deepspeed.runtime.engine")
"""Modules that ranks need and that take longer to import than a step."""
CHECKPOINTS = tempfile.TemporaryDirectory()


class Read(dict[str, Any]):
    """A dict that remembers which of its keys were read."""

    def __init__(self, plain: dict[str, Any]) -> None:
        super().__init__(plain)
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def __deepcopy__(self, _memo: object) -> "Read":
        return self


def check(job: dict[str, Any]) -> None:
    """Parse the launch line and the configuration, and train a step with the program."""
    module = module_of(job["text"])
    check_launch(job, module)
    check_keys(copy.deepcopy(module.CONFIG), job)
    if (refused := trained(job, module.CONFIG)) is not None:
        raise RuntimeError(refused)


def module_of(text: str) -> Any:
    """Return the exported program as a module."""
    module = ModuleType("exported")
    exec(compile(text, "deepspeed_layout.py", "exec"), module.__dict__)  # noqa: S102
    return module


def check_launch(job: dict[str, Any], module: Any) -> None:
    """Parse the launch line by the launcher and the program: it names the plan's ranks."""
    words = shlex.split(re.sub(r"\$\{(\w+):\?[^}]*\}", r"/\1", job["launch"]))
    given = importlib.import_module("deepspeed.launcher.runner").parse_args(words[1:])
    ranks = job["plan"]["inputs"]["world_size"]
    assert max(given.num_nodes, 1) * given.num_gpus == ranks or given.num_gpus < 0
    assert given.user_script == "deepspeed_layout.py"
    with patch.object(sys, "argv", [given.user_script, "--local_rank=0", *given.user_args]):
        assert module.arguments().data == "/DATA"


def check_keys(plain: dict[str, Any], job: dict[str, Any]) -> None:
    """Parse the configuration for all ranks; each key is read and has the plan's value."""
    layout, inputs = job["plan"]["layout"], job["plan"]["inputs"]
    tree = Read({key: Read(sub) if isinstance(sub, dict) else sub for key, sub in plain.items()})
    mpu = SimpleNamespace(get_data_parallel_world_size=lambda: layout["dp"])
    settings = importlib.import_module("deepspeed.runtime.config")
    settings.dist.get_rank = lambda: 0
    config = settings.DeepSpeedConfig(tree, mpu=mpu)
    assert config.train_batch_size == inputs["global_batch"]
    assert config.zero_config.stage == layout["zero"]
    assert set(plain["zero_optimization"]) <= set(type(config.zero_config).model_fields)
    autoep = importlib.import_module("deepspeed.module_inject.auto_ep_config")
    if experts := tree.get("expert_parallel"):
        parsed = autoep.parse_autoep_config(experts)
        autoep.validate_autoep_config(
            parsed, inputs["world_size"], 1, layout["tp"], 1, zero_stage=layout["zero"]
        )
        assert set(experts) <= experts.seen
        assert parsed.autoep_size == layout["ep"]
    if tensor := tree.get("tensor_parallel"):
        parsed = config.tensor_parallel_config
        assert tensor["autotp_size"] == parsed.autotp_size == layout["tp"]
        assert set(tensor) <= set(type(parsed).model_fields)
        parsed.get_partition_config_object()
    assert set(tree) <= tree.seen, set(tree) - tree.seen


def small(config: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the configuration with ep and tp of the real ranks, and how many they are."""
    plain = copy.deepcopy(config)
    plain["optimizer"]["params"]["torch_adam"] = True
    for size in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"):
        plain[size] = min(2, plain[size])
    ranks = 2 if {"expert_parallel", "tensor_parallel"} & set(plain) else 1
    if "expert_parallel" in plain:
        plain["expert_parallel"]["autoep_size"] = ranks
    if "tensor_parallel" in plain:
        plain["tensor_parallel"]["autotp_size"] = ranks
    return plain, ranks


def checkpoint(job: dict[str, Any]) -> str:
    """Return the folder of a small model of the family, made once for each model."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = Path(CHECKPOINTS.name, job["plan"]["inputs"]["model"])
    if not folder.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(small_config(job["config"])).save_pretrained(folder)
    return str(folder)


def trained(job: dict[str, Any], config: dict[str, Any]) -> str | None:
    """Return what the program refuses for a small model on real ranks."""
    import torch

    (plain, ranks), folder = small(config), checkpoint(job)
    context, port = torch.multiprocessing.get_context("forkserver"), random.randint(20_000, 60_000)
    context.set_forkserver_preload(list(_PRELOADED))
    answers = context.Queue()
    workers = [
        context.Process(
            target=work, args=(rank, ranks, port, job["text"], folder, plain, answers), daemon=True
        )
        for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    try:
        refusals = [answers.get(timeout=_SECONDS) for _ in workers]
    except queue.Empty:
        refusals = ["the ranks did not answer"]
    for worker in workers:
        worker.terminate()
    return next((refusal for refusal in refusals if refusal is not None), None)


def work(
    rank: int, ranks: int, port: int, text: str, folder: str, plain: dict[str, Any], answers: Any
) -> None:
    """Train a step as one rank, and answer what was refused."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
    import torch

    torch.set_num_threads(1)
    try:
        module = module_of(text)
        backend: Any = importlib.import_module("deepspeed.comm.torch")
        backend.build_shm_op = lambda: None  # a shortcut of gloo's, compiled at start
        module.deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        module.CONFIG = plain
        ids = [torch.randint(0, 1000, (32,)) for _ in range(4 * ranks)]
        rows = [{"input_ids": row, "labels": row} for row in ids]
        engine, batches = module.make_engine(module.load_model(folder), rows)
        batches.num_local_io_workers = 0
        with redirect_stdout(io.StringIO()):
            module.train(engine, batches)
        assert engine.global_steps
        assert all(torch.isfinite(value).all() for value in engine.module.parameters())
    except Exception as error:  # noqa: BLE001 - of any kind: it is what the user would see
        answers.put(f"{type(error).__name__}: {error}")
    else:
        answers.put(None)


if __name__ == "__main__":  # ranks import this module, too
    os.environ["DS_ACCELERATOR"] = "cpu"
    judge_all(check)
