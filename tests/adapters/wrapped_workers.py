"""What ranks do in the tests of adapted models under what else trains, wraps and saves models."""

import copy
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from transformers import Trainer, TrainingArguments

import moetune
from tests.adapters.tiny_models import tiny, tokens_of
from tests.adapters.workers import (
    TOLERANCE,
    check_states,
    layers_of,
    raised,
    rank_of,
    same_on_all,
    whole_state,
)


def _with_accelerate(model: Any) -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    state = SimpleNamespace(fsdp_plugin=plugin)
    fsdp2_prepare_model(SimpleNamespace(state=state, mixed_precision="no"), model)


def _block_by_block(model: Any) -> None:
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)


def refuses_to_shard_what_ranks_have_alone() -> None:
    """Each wrapper that takes experts of different ranks for replicas is refused at once."""
    mesh = init_device_mesh("cpu", (rank_of()[1],))
    wrappers: tuple[Callable[[Any], object], ...] = (
        fully_shard, _block_by_block, _with_accelerate, lambda model: replicate(model, mesh=mesh),
        lambda model: fully_shard(model.model.layers[0].mlp.experts),
    )  # fmt: skip
    for wrap in wrappers:
        whole = tiny("Qwen3Moe")
        adapted = moetune.adapt(tiny("Qwen3Moe"))
        text = same_on_all(raised(lambda: wrap(adapted)))  # noqa: B023 - called at once
        assert "would be a DTensor of" in text, wrap
        assert "call moetune.prepare_fsdp(model, mesh) first" in text, wrap
        experts = adapted.model.layers[0].mlp.experts
        assert type(experts).__name__ == type(whole.model.layers[0].mlp.experts).__name__
        name = "model.layers.0.mlp.experts.down_proj"
        weight = adapted.model.layers[0].mlp.experts.state_dict()["down_proj"].full_tensor()
        assert torch.equal(weight, whole.get_parameter(name)), wrap
    sharded = tiny("Qwen3Moe")
    fully_shard(sharded)
    assert "is a DTensor already" in same_on_all(raised(lambda: moetune.adapt(sharded)))
    adapted = moetune.prepare_fsdp(moetune.adapt(tiny("Qwen3Moe")), mesh)
    _block_by_block(adapted)
    check_states(whole_state(adapted), tiny("Qwen3Moe").state_dict())


class Lora(nn.Module):
    """An adapter of experts, as PEFT's ParamWrapper: low ranks are added while the module runs."""

    class Sum(nn.Module):
        """The parametrization: the base and a product for each expert."""

        def __init__(self, delta: torch.Tensor) -> None:
            super().__init__()
            self.delta = delta

        def forward(self, base: torch.Tensor) -> torch.Tensor:
            return base + self.delta

    def __init__(self, base_layer: nn.Module, name: str) -> None:
        super().__init__()
        self.base_layer, self.name = base_layer, name
        num, *rest = base_layer.get_parameter(name).shape
        self.lora_A = nn.Parameter(torch.ones(num, rest[0], 1, dtype=torch.float64))
        self.lora_B = nn.Parameter(torch.zeros(num, 1, rest[1], dtype=torch.float64))

    def forward(self, *inputs: torch.Tensor, **options: Any) -> torch.Tensor:
        delta = self.lora_A @ self.lora_B
        register_parametrization(self.base_layer, self.name, self.Sum(delta), unsafe=True)
        try:
            y: torch.Tensor = self.base_layer(*inputs, **options)
            return y
        finally:
            remove_parametrizations(self.base_layer, self.name, leave_parametrized=False)


def wrap_experts(model: Any) -> Any:
    for block in model.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            experts = block.mlp.experts
            base = experts.base_layer if isinstance(experts, Lora) else experts
            block.mlp.experts = Lora(base, name)
    return model


def loras_of_experts() -> None:
    """Adapters of experts are trained on one rank, and refused by name on several."""
    tokens = tokens_of(rank_of()[0])
    text = same_on_all(raised(lambda: moetune.adapt(wrap_experts(tiny("Qwen3Moe")))))
    assert "Qwen3MoeExperts are wrapped by Lora already" in text
    adapted = wrap_experts(moetune.adapt(tiny("Qwen3Moe")))
    if rank_of()[1] == 1:
        logits = adapted(input_ids=tokens).logits
        assert (logits - tiny("Qwen3Moe")(input_ids=tokens).logits).abs().max() <= TOLERANCE
        logits.sum().backward()
        assert all(
            each.grad is not None for name, each in adapted.named_parameters() if "lora_B" in name
        )
        return
    text = same_on_all(raised(lambda: adapted(input_ids=tokens)))
    assert "down_proj is computed from other parameters, as by LoRA" in text
    assert "adapt the attention's modules alone" in text


def saves_whole_or_refuses(folder: str) -> None:
    """Every way to save writes whole experts, or is refused before anything is written."""
    num_ranks = rank_of()[1]
    mesh = init_device_mesh("cpu", (num_ranks,))

    def inner() -> Any:
        model = tiny("Qwen3Moe")
        moetune.adapt(model.model)
        return model

    def layers() -> Any:
        model = tiny("Qwen3Moe")
        moetune.adapt(model.model.layers)
        return model

    def sharded() -> Any:
        adapted = moetune.prepare_fsdp(moetune.adapt(tiny("Qwen3Moe")), mesh)
        _block_by_block(adapted)
        adapted(input_ids=tokens_of(0)).logits.sum().backward()
        return adapted

    whole = tiny("Qwen3Moe")
    makes: tuple[Callable[[], Any], ...] = (
        inner, layers, sharded,
        lambda: copy.deepcopy(moetune.adapt(tiny("Qwen3Moe"))),
    )  # fmt: skip
    for number, make in enumerate(makes):
        place = f"{folder}/{number}"
        make().save_pretrained(place)
        again = type(whole).from_pretrained(place, dtype=torch.float64)
        check_states(again.state_dict(), whole.state_dict())
    adapted = inner()
    adapted.save_pretrained(f"{folder}/given", state_dict=whole_state(adapted))
    dist.barrier()
    again = type(whole).from_pretrained(f"{folder}/given", dtype=torch.float64)
    check_states(again.state_dict(), whole.state_dict())
    with _started(), tempfile.TemporaryDirectory() as empty:
        accelerator = Accelerator(cpu=True)
        prepared = accelerator.prepare(moetune.prepare_ddp(moetune.adapt(tiny("Qwen3Moe"))))
        for save in (accelerator.save_state, partial(accelerator.save_model, prepared)):
            text = same_on_all(raised(lambda: save(f"{empty}/state")))  # noqa: B023 - called at once
            assert "would write the experts of the first rank alone" in text
            assert not list(Path(empty).iterdir())


@contextmanager
def _started() -> Iterator[None]:
    """Show the ranks as a launcher does."""
    rank, num_ranks = map(str, rank_of())
    with pytest.MonkeyPatch.context() as patch:
        names = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks,
            "LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
        }  # fmt: skip
        for name, value in names.items():
            patch.setenv(name, value)
        yield


def trains_in_a_trainer(folder: str) -> None:
    """The Trainer's own clipping and saving end at the weights of one process."""
    rank, num_ranks = rank_of()
    text = {"input_ids": tokens_of(0)[0], "labels": tokens_of(0)[0]}
    whole, norms = tiny("Qwen3Moe"), []
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        whole(**{name: value.unsqueeze(0) for name, value in text.items()}).loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.2)))
        optimizer.step()
    options: dict[str, Any] = {
        "use_cpu": True, "max_steps": 3, "per_device_train_batch_size": 1, "report_to": [],
        "logging_steps": 1, "disable_tqdm": True, "optim": "sgd", "learning_rate": 0.5,
        "lr_scheduler_type": "constant", "max_grad_norm": 0.2, "save_strategy": "steps",
        "save_steps": 3,
    }  # fmt: skip
    with _started():
        adapted = moetune.prepare_ddp(moetune.adapt(tiny("Qwen3Moe")))
        refused = raised(lambda: Trainer(adapted, TrainingArguments(folder, **options)))
        assert 'set save_only_model=True or save_strategy="no"' in same_on_all(refused)
        frozen = moetune.adapt(tiny("Qwen3Moe"))
        for layer in layers_of(frozen):
            for parameter in layer.experts.parameters():
                parameter.requires_grad = False
        Trainer(frozen, TrainingArguments(folder, **options))  # of which no state is of one rank
        arguments = TrainingArguments(folder, save_only_model=True, **options)
        trainer = Trainer(adapted, arguments, train_dataset=[text] * 3 * num_ranks)
        trainer.train()
        trainer.save_model(f"{folder}/end")
    dist.barrier()
    logged = [each["grad_norm"] for each in trainer.state.log_history if "grad_norm" in each]
    assert logged == pytest.approx(norms, abs=1e-6)
    check_states(whole_state(adapted), whole.state_dict())
    for place in ("checkpoint-3", "end"):
        again = type(whole).from_pretrained(f"{folder}/{place}", dtype=torch.float64)
        check_states(again.state_dict(), whole.state_dict())
    values = [torch.empty(0)] * num_ranks
    dist.all_gather_object(values, adapted.get_parameter("lm_head.weight").detach())
    assert all(torch.equal(value, values[rank]) for value in values)


def any_ranks(folder: str) -> None:
    """What is shown on any number of ranks, which are started once."""
    saves_whole_or_refuses(f"{folder}/saved")
    trains_in_a_trainer(f"{folder}/trained")
    refuses_to_shard_what_ranks_have_alone()
    loras_of_experts()
