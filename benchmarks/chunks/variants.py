"""Ways to train one model on the data of several ranks: ours, torch's and DeepSpeed's.

All begin with the same weights and make the same AdamW steps.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import moetune
from examples.language_model import LanguageModel, next_token_loss
from moetune.comm.group import OneRank
from moetune.domain.model import Transformer
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.sharded.placement import Traffic

LEARNING_RATE = 1e-3
_SEED = 1
Step = Callable[[torch.Tensor], torch.Tensor]
"""Takes this rank's (B, S + 1) tokens, trains on them and returns the loss."""


def make_model(transformer: Transformer, *, recompute: bool = False) -> LanguageModel:
    """Return the whole model, its experts on this rank alone.

    Args:
        recompute: blocks run forward again before their backward pass.
    """
    moe = transformer.moe
    model = LanguageModel(
        transformer,
        lambda: MoELayer(
            moe.d_model, moe.d_hidden, moe.num_experts, moe.top_k, activation=moe.activation,
            pipeline=False, communicator=OneRank(),
        ),
    )  # fmt: skip
    model.reset_parameters(_SEED)
    if recompute:
        for block in model.blocks.values():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def make_step(
    variant: str, model: LanguageModel, *, chunk_bytes: int, places: int, scatter: bool,
    offload: bool,
) -> Step:  # fmt: skip
    """Return the training step that a variant's name stands for.

    Args:
        chunk_bytes, places: of the variants of ours that have a small cache.
        scatter, offload: of the planned variant.

    Raises:
        KeyError: no such variant.
    """
    planned = {"scatter": scatter, "offload": offload}
    ours: dict[str, dict[str, Any]] = {
        "moetune planned": {"cache_bytes": places * chunk_bytes, **planned},
        "moetune whole": {"scatter": False},
        "moetune cached": {},
        "moetune": {"cache_bytes": places * chunk_bytes},
        "moetune offload": {"cache_bytes": places * chunk_bytes, "offload": True},
    }
    if variant in ours:
        return _ours(model, chunk_bytes=chunk_bytes, **ours[variant])
    peers: dict[str, Callable[[], Step]] = {
        "DDP": lambda: _torch_step(DistributedDataParallel(model)),
        "fully_shard cached": lambda: _torch_step(_fully_sharded(model, reshard=False)),
        "fully_shard": lambda: _torch_step(_fully_sharded(model, reshard=True)),
        # Without an accelerator there is nothing to pin memory for.
        "fully_shard offload": lambda: _torch_step(
            _fully_sharded(model, reshard=True, offload_policy=CPUOffloadPolicy(pin_memory=False))
        ),
        "DeepSpeed ZeRO-3": lambda: _deepspeed(model, offload=False),
        "DeepSpeed ZeRO-3 offload": lambda: _deepspeed(model, offload=True),
    }
    return peers[variant]()


def traffic(model: nn.Module) -> Traffic | None:
    """Return what our chunks moved so far; None for the others."""
    try:
        chunks = moetune.model_chunks(model)
    except moetune.InputError:
        return None
    chunks.finish_reductions()
    return chunks.traffic


def _ours(model: LanguageModel, **options: Any) -> Step:  # noqa: ANN401 - of moetune.shard
    sharded, optimizer = moetune.shard(model, _optimizer(model.parameters()), **options)
    return _step_of(sharded, optimizer)


def _torch_step(model: nn.Module) -> Step:
    return _step_of(model, _optimizer(model.parameters(), fused=True))


def _fully_sharded(model: LanguageModel, *, reshard: bool, **options: Any) -> nn.Module:  # noqa: ANN401
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.blocks.values(), model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, **options)
    return model


def _optimizer(parameters: Iterator[nn.Parameter], **options: Any) -> torch.optim.Optimizer:  # noqa: ANN401
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, **options)


def _step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(text_BS: torch.Tensor) -> torch.Tensor:
        loss = next_token_loss(model(text_BS[:, :-1]), text_BS[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _deepspeed(model: LanguageModel, *, offload: bool) -> Step:
    import deepspeed

    host = {"device": "cpu", "pin_memory": False}
    sharding: dict[str, Any] = {"stage": 3}
    if offload:
        sharding |= {"offload_optimizer": host, "offload_param": host}
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": sharding,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": LEARNING_RATE, "weight_decay": 0.01, "torch_adam": not offload},
            },
            "zero_allow_untested_optimizer": True,
        },
    )

    def step(text_BS: torch.Tensor) -> torch.Tensor:
        loss = next_token_loss(engine(text_BS[:, :-1]), text_BS[:, 1:])
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
