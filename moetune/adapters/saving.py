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
from moetune.domain.errors import CollectiveError, InputError
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
    owners = {
        id(each): (layer, own_name)
        for layer in model.modules()
        if isinstance(layer, PlannedLayer)
        for own_name, each in layer.experts.module.named_parameters(recurse=False)
    }
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    state: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in owners:
            if is_first:
                state[name] = value.detach()
            continue
        layer, own_name = owners[id(value)]
        parts = layer.communicator.gather(value.detach(), f"the experts of {name}")
        if is_first:
            state[name] = layer.experts.placement.whole(own_name, parts)
    return state


def _save(model: Any, save_directory: str | os.PathLike[str], **options: Any) -> None:  # noqa: ANN401 - a model of transformers
    """Write what the model before `moetune.adapt` would write; all ranks call this.

    Args:
        options: of the class's own method, but no state dict.

    Raises:
        InputError: a state dict was given.
        CollectiveError: a rank left, or the first one could not write.
    """
    if options.get("state_dict") is not None:
        raise InputError(
            "save_pretrained gathers the experts of all ranks itself, and was given a state_dict",
            "omit it, on every rank",
        )
    state, world = whole_state_dict(model), shared_communicator()
    problem: Exception | None = None
    if world.rank == 0:
        write = type(model).save_pretrained  # the class's own: the model's is this one
        try:
            write(model, save_directory, **{**options, "state_dict": state})
        except Exception as error:  # noqa: BLE001 - raised again when the others know
            problem = error
    told = world.broadcast_object("" if problem is None else str(problem), "the end of saving")
    if problem is not None:
        raise problem
    if told:
        raise CollectiveError(f"the first rank could not save the model: {told}")
