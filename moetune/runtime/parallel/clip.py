"""`moetune.clip_grad_norm_`: clip where ranks have different experts, or shards of parameters."""

import torch
from torch import nn

from moetune.comm.group import Communicator, OneRank
from moetune.domain.errors import InputError
from moetune.runtime.moe.optimizer_states import spread_parameters
from moetune.runtime.moe.total_norm import gradient_parts, norm_of_parts, norm_over_ranks
from moetune.runtime.sharded.hooks import ChunkedParameter
from moetune.runtime.sharded.model_chunks import ModelChunks, model_chunks

_EPSILON = 1e-6
"""Added to the norm, as torch does."""


def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; return the norm before.

    The norm is that of the whole model, of all ranks' experts and shards, and equal on all ranks.
    For models on one rank, under `prepare_ddp`, `prepare_fsdp` and `shard`; all ranks call it.

    Args:
        max_norm: largest 2-norm.

    Raises:
        InputError: it is no module, or a part of one of `moetune.shard`.
        CollectiveError: a rank left.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"clip_grad_norm_ was given a {type(model).__name__}, which does not tell which "
            "parameters are experts of one rank",
            "give it the model itself",
        )
    if any(isinstance(parameter, ChunkedParameter) for parameter in model.parameters()):
        return _chunks(model).clip_grad_norm_(max_norm)
    return clip_gradients(model, max_norm, OneRank())


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float, stages: Communicator) -> torch.Tensor:
    """Scale all gradients as `clip_grad_norm_` does, of a model or of a rank's stages of one.

    Args:
        stages: the ranks that have the other stages.
    """
    parts = gradient_parts(model.parameters(), spread_parameters())
    norm = norm_of_parts(parts, device=stages.device)
    norm = norm_over_ranks(norm, stages, 2.0)
    scale = (max_norm / (norm + _EPSILON)).clamp(max=1)
    for grads in parts.values():
        for grad in grads:
            grad.mul_(scale.to(grad.device))
    return norm


def _chunks(model: nn.Module) -> ModelChunks:
    try:
        return model_chunks(model)
    except InputError as error:
        raise InputError(
            f"this {type(model).__name__} is a part of a model of moetune.shard, whose gradients "
            "are in chunks",
            "give the model that moetune.shard returned",
        ) from error
