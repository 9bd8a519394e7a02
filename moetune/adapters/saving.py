"""Saving a model whose experts are spread over ranks as the model of one rank.

Experts are gathered parameter by parameter on the CPU of the first rank, which writes.
"""

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moetune.comm.gloo import shared_communicator
from moetune.comm.group import Communicator
from moetune.runtime.moe.planned_layer import PlannedLayer


def save_whole(model: nn.Module, communicator: Communicator) -> None:
    """Let a model's `save_pretrained` write all ranks' experts, if it has that method."""
    if communicator.num_ranks > 1 and hasattr(model, "save_pretrained"):
        model.save_pretrained = partial(_save, model)  # type: ignore[assignment] # torch types it as a module


def whole_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict with all ranks' experts on the first rank; all ranks call this.

    Returns:
        On rank 0 of the world plain tensors with the names and shapes of the model before
        `moetune.adapt`, experts on the CPU; elsewhere an empty one.

    Raises:
        CollectiveError: a rank left.
    """
    layers = [module for module in model.modules() if isinstance(module, PlannedLayer)]
    owners = {id(each): layer for layer in layers for each in layer.experts.parameters()}
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    state: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        layer = owners.get(id(value))
        if layer is None:
            whole = [value.detach()]
        else:
            whole = layer.communicator.gather(value.detach(), f"the experts of {name}")
        if is_first:
            state[name] = whole[0] if layer is None else torch.cat(whole)
    return state


def _save(model: Any, save_directory: str | os.PathLike[str], **options: Any) -> None:  # noqa: ANN401 - a model of transformers
    """Write what the model before `moetune.adapt` would write; all ranks call this."""
    state = whole_state_dict(model)
    if dist.get_rank() == 0:
        write = type(model).save_pretrained  # the class's own: the model's is this one
        write(model, save_directory, **{**options, "state_dict": state})
    shared_communicator().barrier("the end of saving")
