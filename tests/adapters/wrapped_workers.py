"""What ranks do in the tests of adapted models under what else trains, wraps and saves models."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import moetune
from tests.adapters.tiny_models import tiny
from tests.adapters.workers import check_states, raised, rank_of, same_on_all, whole_state


def _with_accelerate(model: Any) -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    state = SimpleNamespace(fsdp_plugin=plugin)
    fsdp2_prepare_model(SimpleNamespace(state=state, mixed_precision="no"), model)  # type: ignore[arg-type] # all that it reads


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


def any_ranks(folder: str) -> None:
    """What is shown on any number of ranks, which are started once."""
    assert folder
    refuses_to_shard_what_ranks_have_alone()
