"""DeepSpeed's own reading of an exported configuration, and its engine on a small model.

The whole configuration is parsed for all ranks, each of its keys must have been read, and AutoEP's
and AutoTP's checks are asked. A model with a few layers and the real numbers of heads and experts
then trains a step in a DeepSpeedEngine on one or two real ranks (gloo), ep and tp cut down to them.
"""

import copy
import importlib
import json
import os
import queue
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from common import judge_all  # type: ignore[import-not-found]
from small_models import small_config  # type: ignore[import-not-found]

_SECONDS = 200.0
_NOTES = "_plan"


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
    """Parse the configuration for all ranks, and train a step with it on a few."""
    check_keys(json.loads(job["text"]), job)
    if (refused := trained(job)) is not None:
        raise RuntimeError(refused)


def check_keys(plain: dict[str, Any], job: dict[str, Any]) -> None:
    """Parse the configuration for all ranks; each key is read and has the plan's value."""
    layout, inputs = job["plan"]["layout"], job["plan"]["inputs"]
    tree = Read({key: Read(one) if isinstance(one, dict) else one for key, one in plain.items()})
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
    assert set(tree) - {_NOTES} <= tree.seen, set(tree) - tree.seen


def small(job: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the configuration with ep and tp of the real ranks, and how many they are."""
    plain = copy.deepcopy(json.loads(job["text"]))
    plain["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
    plain["gradient_accumulation_steps"] = min(2, plain["gradient_accumulation_steps"])
    ranks = 2 if {"expert_parallel", "tensor_parallel"} & set(plain) else 1
    if "expert_parallel" in plain:
        plain["expert_parallel"]["autoep_size"] = ranks
    if "tensor_parallel" in plain:
        plain["tensor_parallel"]["autotp_size"] = ranks
    return plain, ranks


def trained(job: dict[str, Any]) -> str | None:
    """Return what an engine of the small model refuses on real ranks."""
    import torch

    plain, ranks = small(job)
    context, port = torch.multiprocessing.get_context("forkserver"), random.randint(20_000, 60_000)
    context.set_forkserver_preload(["torch", "transformers", "deepspeed"])
    answers = context.Queue()
    workers = [
        context.Process(
            target=work, args=(rank, ranks, port, job["config"], plain, answers), daemon=True
        )
        for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    try:
        found = [answers.get(timeout=_SECONDS) for _ in workers]
    except queue.Empty:
        found = ["the ranks did not answer"]
    for worker in workers:
        worker.terminate()
    return next((one for one in found if one is not None), None)


def work(
    rank: int, ranks: int, port: int, config: dict[str, Any], plain: dict[str, Any], answers: Any
) -> None:
    """Train a step as one rank, and answer what was refused."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
    import torch

    torch.set_num_threads(1)
    try:
        import deepspeed
        from transformers import AutoModelForCausalLM

        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(small_config(config), dtype=torch.bfloat16)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=plain
        )
        ids = torch.randint(0, 1000, (1, 32))
        for _ in range(plain["gradient_accumulation_steps"]):
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            assert torch.isfinite(loss)
    except Exception as error:  # noqa: BLE001 - of any kind: it is what the user would see
        answers.put(f"{type(error).__name__}: {error}")
    else:
        answers.put(None)


if __name__ == "__main__":  # ranks import this module, too
    os.environ["DS_ACCELERATOR"] = "cpu"
    judge_all(check)
