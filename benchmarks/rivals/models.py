"""The ways to train the model that need torch, transformers and moetune alone.

All begin with the same weights, average gradients over both ranks, and make AdamW's steps.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import moetune
from benchmarks.rivals.case import LEARNING_RATE, load_model
from benchmarks.rivals.predicted import degrees_of
from examples.language_model import next_token_loss
from moetune.domain.plan import Decision
from moetune.runtime.moe.routed_layer import RoutedLayer

Step = Callable[[torch.Tensor], torch.Tensor]
"""Trains on this rank's (B, S + 1) tokens and returns its loss."""


class Ours:
    """The adapted model, which all variants of ours have in common, under DDP."""

    def __init__(self, folder: Path) -> None:
        model = moetune.prepare_ddp(moetune.adapt(load_model(folder)))
        self._model = DistributedDataParallel(model)
        self._optimizer = adamw(model.parameters())
        self._layers = [one for one in model.modules() if isinstance(one, RoutedLayer)]

    def step(self, variant: str) -> Step:
        """Return the step of a variant: its chunks, forward/backward."""
        forward, backward = degrees_of(variant)
        decision = Decision(forward_degree=forward, backward_degree=backward)

        def step(text_BS: torch.Tensor) -> torch.Tensor:
            for layer in self._layers:
                layer.pin(decision)
            return _plain_step(self._model, self._optimizer, text_BS)

        return step


def transformers_fsdp_step(folder: Path) -> Step:
    """Return the step of transformers' expert parallelism as it documents it: FSDP2 beside it."""
    from transformers.distributed import DistributedConfig

    world = dist.get_world_size()
    config = DistributedConfig(
        fsdp_size=world, ep_size=world, ep_implementation="all_to_all"
    )  # fmt: skip
    return plain_step(load_model(folder, distributed_config=config))


def transformers_ddp_step(folder: Path) -> Step:
    """Return the step of transformers' exchange of tokens, with DDP for the dense gradients.

    DDP leaves experts out, whose gradients are sums over the tokens of both ranks.
    """
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    model = load_model(folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("ep", "tp"))
    plan = model._expand_parallel_plan(model.ep_plan)  # noqa: SLF001 - as transformers calls it
    apply_expert_parallelism(model, mesh["ep"], mesh["tp"], plan, ep_implementation="all_to_all")
    return expert_parallel_step(
        model, {name for name, _ in model.named_parameters() if ".experts." in name}
    )


def expert_parallel_step(model: nn.Module, experts: set[str]) -> Step:
    """Return the step of a model whose experts are not replicas: DDP averages the others.

    Args:
        experts: names of their parameters.
    """
    for name in experts:
        model.get_parameter(name).register_post_accumulate_grad_hook(_mean)
    model._ddp_params_and_buffers_to_ignore = experts  # type: ignore[assignment]  # noqa: SLF001 - as DDP has it
    return plain_step(DistributedDataParallel(model))


def _mean(parameter: torch.Tensor) -> None:
    """Turn the sum over all ranks' mean losses into the mean's gradient."""
    assert parameter.grad is not None  # noqa: S101 - called behind it
    parameter.grad.div_(dist.get_world_size())


def fsdp2_step(folder: Path) -> Step:
    """Return the step of FSDP2 alone; blocks stay gathered until their backward pass."""
    model = load_model(folder)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    return plain_step(model)


def ddp_step(folder: Path) -> Step:
    """Return the step of DistributedDataParallel alone."""
    return plain_step(DistributedDataParallel(load_model(folder)))


def loss_of(model: Callable[..., Any], text_BS: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the next tokens of (B, S + 1)."""
    logits_BSV = model(input_ids=text_BS[:, :-1], use_cache=False).logits
    return next_token_loss(logits_BSV, text_BS[:, 1:])


def plain_step(model: nn.Module) -> Step:
    """Return the step of a model whose backward pass averages its gradients."""
    optimizer = adamw(model.parameters())
    return partial(_plain_step, model, optimizer)


def _plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, text_BS: torch.Tensor
) -> torch.Tensor:
    loss = loss_of(model, text_BS)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer of all variants; one kernel takes DTensors, or others, not both."""
    groups: dict[type, list[nn.Parameter]] = {}
    for each in parameters:
        groups.setdefault(type(each.data), []).append(each)
    return torch.optim.AdamW(
        [{"params": group} for group in groups.values()], lr=LEARNING_RATE, fused=True
    )
