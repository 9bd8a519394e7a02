"""What ranks do in the tests of adapted models under what else trains, wraps and saves models."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations

import moetune
from tests.adapters.tiny_models import tiny, tokens_of
from tests.adapters.workers import (
    TOLERANCE,
    check_states,
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
        found = adapted.model.layers[0].mlp.experts.state_dict()["down_proj"].full_tensor()
        assert torch.equal(found, whole.get_parameter(name)), wrap
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


def any_ranks(folder: str) -> None:
    """What is shown on any number of ranks, which are started once."""
    assert folder
    refuses_to_shard_what_ranks_have_alone()
    loras_of_experts()
