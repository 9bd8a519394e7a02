"""Clip gradients by their norm where ranks have different experts, or shards of parameters.

torch's own `clip_grad_norm_` takes plain gradients for equal ones: each rank would clip by the norm
of its own experts, and the replicas of everything else would drift apart.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from moetune.comm.group import Communicator
from moetune.comm.process_group import GroupCommunicator
from moetune.domain.errors import InputError
from moetune.runtime.moe.local_parts import is_dtensor
from moetune.runtime.parallel.replicas import spread_layers
from moetune.runtime.parallel.tensor import TensorParallelModule
from moetune.runtime.sharded.hooks import ChunkedParameter
from moetune.runtime.sharded.model_chunks import ModelChunks, model_chunks

_EPSILON = 1e-6
"""Added to the norm, as torch does."""


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; return the norm before.

    The norm is that of the whole model, of all ranks' experts and shards, and equal on all ranks.
    For models on one rank, under `prepare_ddp`, `prepare_fsdp` and `shard`; all ranks call it.

    Args:
        max_norm: largest 2-norm.

    Raises:
        InputError: it is no module, or a part of one of `moetune.shard`; or tensor-parallel ranks
            have parts of a layer that say nothing of it.
        CollectiveError: a rank left.
    """
    if not isinstance(model, nn.Module):
        raise InputError(
            f"clip_grad_norm_ was given a {type(model).__name__}, which does not tell which "
            "parameters are experts of one rank",
            "give it the model itself",
        )
    if any(isinstance(each, ChunkedParameter) for each in model.parameters()):
        return _chunks(model).clip_grad_norm_(max_norm)
    cut = next(
        (name for name, each in model.named_modules() if isinstance(each, TensorParallelModule)),
        None,
    )
    if cut is not None:
        raise InputError(f"{cut} is cut over tensor-parallel ranks, whose norms are not summed")
    shards: dict[tuple[Communicator, ...], list[torch.Tensor]] = {}
    counted: dict[tuple[Communicator, ...], list[torch.Tensor]] = {}
    for groups, grad, own in _gradients(model):
        shards.setdefault(groups, []).append(grad)
        counted.setdefault(groups, []).append(own)
    squares = [_square_sum(grads, groups) for groups, grads in counted.items()]
    if not squares:
        return torch.zeros((), device="cpu")
    norm = torch.stack(squares).sum().sqrt()
    scale = (max_norm / (norm + _EPSILON)).clamp(max=1)
    for grads in shards.values():
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


def _gradients(
    model: nn.Module,
) -> Iterator[tuple[tuple[Communicator, ...], torch.Tensor, torch.Tensor]]:
    """Yield each gradient on this rank, the groups over which it is cut, and what counts of it.

    Of replicas of hot experts one counts.
    """
    experts = {
        id(parameter): layer
        for _, layer in spread_layers(model)
        for parameter in layer.experts.parameters()
    }
    meshes: dict[tuple[object, ...], tuple[Communicator, ...]] = {}
    for parameter in model.parameters():
        grad = parameter.grad
        if grad is None:
            continue
        if not is_dtensor(grad):
            owner = experts.get(id(parameter))
            if owner is None:
                yield (), grad, grad
                continue
            rows = owner.experts.placement.counted_rows
            yield (owner.communicator,), grad, grad if rows is None else grad[rows]
            continue
        mesh = grad.device_mesh
        dims = tuple(dim for dim, each in enumerate(grad.placements) if not each.is_replicate())
        if (mesh, dims) not in meshes:
            meshes[mesh, dims] = tuple(GroupCommunicator(mesh.get_group(dim)) for dim in dims)
        local = grad.to_local()
        yield meshes[mesh, dims], local, local


def _square_sum(grads: Iterable[torch.Tensor], groups: Iterable[Communicator]) -> torch.Tensor:
    """Return Σ g² over the groups' ranks, in at least float32."""
    norms = [
        torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32))
        for grad in grads
    ]
    total = torch.stack([norm.to(norms[0]) for norm in norms]).square().sum()
    for group in groups:
        group.all_reduce(total, "the sum of the gradients' norm").wait()
    return total
