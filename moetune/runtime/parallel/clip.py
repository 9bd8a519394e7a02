"""Clip gradients by their norm where ranks have different experts, or shards of parameters.

torch's own `clip_grad_norm_` takes plain gradients for equal ones: each rank would clip by the norm
of its own experts, and the replicas of everything else would drift apart.
"""

import functools
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from moetune.comm.gloo import communicator_of
from moetune.comm.group import Communicator, OneRank
from moetune.domain.errors import InputError
from moetune.runtime.moe.local_parts import is_dtensor
from moetune.runtime.moe.optimizer_states import spread_parameters
from moetune.runtime.replicas import spread_layers
from moetune.runtime.sharded.hooks import ChunkedParameter
from moetune.runtime.sharded.model_chunks import ModelChunks, model_chunks

_EPSILON = 1e-6
"""Added to the norm, as torch does."""
_SUM = "the sum of the gradients' norm"
_Owners: TypeAlias = dict[int, Communicator]
"""The ranks that have the other experts of a parameter, by its id."""
_Parts: TypeAlias = dict[tuple[Communicator, ...], tuple[torch.Tensor, list[torch.Tensor]]]


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
    parts = _parts(model)
    squares = [_square_sum(groups, zero, grads) for groups, (zero, grads) in parts.items()]
    device = squares[0].device if squares else stages.device
    zero = torch.zeros((), dtype=torch.float64, device=device)
    total = torch.stack([zero, *(square.to(zero) for square in squares)]).sum()
    stages.all_reduce(total, _SUM).wait()
    norm = total.sqrt()
    scale = (max_norm / (norm + _EPSILON)).clamp(max=1)
    for _, grads in parts.values():
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


def _parts(model: nn.Module) -> _Parts:
    """Return the model's gradients by the groups over which they are cut, equal on all ranks.

    Parameters tell the groups: a rank without gradients of its experts takes part in the sum.

    Returns:
        For each group a zero of the sum's dtype and device, and this rank's gradients.
    """
    owners, groups_of = _owners(model), functools.cache(_groups_of)
    parts: _Parts = {}
    for parameter in model.parameters():
        grad, groups = parameter.grad, tuple[Communicator, ...]()
        cut = parameter if grad is None else grad
        if is_dtensor(cut):
            groups = groups_of(cut.device_mesh, cut.placements)
            grad = None if grad is None else cut.to_local()
        elif id(parameter) in owners:
            groups = (owners[id(parameter)],)
        if groups not in parts:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            parts[groups] = torch.zeros((), dtype=dtype, device=parameter.device), []
        if grad is not None:
            parts[groups][1].append(grad)
    return parts


def _square_sum(
    groups: Sequence[Communicator], zero: torch.Tensor, grads: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return Σ g² over the groups' ranks, in at least float32: some may have no gradient."""
    norms = [
        torch.linalg.vector_norm(
            grad, dtype=torch.promote_types(grad.dtype, torch.float32)
        ).to(zero)
        for grad in grads
    ]  # fmt: skip
    total = torch.stack([zero, *norms]).square().sum()
    for group in groups:
        group.all_reduce(total, _SUM).wait()
    return total


def _groups_of(mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[Communicator, ...]:
    """Return the groups of the mesh's dimensions over which a DTensor is cut."""
    dims = [dim for dim, cut in enumerate(placements) if not cut.is_replicate()]
    return tuple(communicator_of(mesh.get_group(dim)) for dim in dims)


def _owners(model: nn.Module) -> _Owners:
    """Return the ranks of each parameter of experts over several, whose layer may be outside."""
    communicator = functools.cache(communicator_of)
    mine = {id(parameter) for parameter in model.parameters()}
    owners = {
        key: communicator(placement.group)
        for key, placement in spread_parameters().items()
        if key in mine and placement.group is not None
    }
    for _, layer in spread_layers(model):
        owners |= {id(parameter): layer.communicator for parameter in layer.experts.parameters()}
    return owners
