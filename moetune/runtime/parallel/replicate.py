"""`moetune.replicate`: data-parallel gradients that are reduced while the link would be idle.

In place of DistributedDataParallel, whose buckets compete with the experts' exchanges for the link.
`dense_gradients` has the hooks and the pieces.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch.distributed as dist
from torch import nn

from moetune.comm.agree import agree_on_digest
from moetune.comm.gloo import new_communicator
from moetune.comm.group import Communicator
from moetune.domain.document import digest
from moetune.domain.errors import InputError
from moetune.domain.gradients import GradientSchedule
from moetune.domain.training import BATCHES_IN_TURNS
from moetune.runtime.moe.local_parts import is_dtensor
from moetune.runtime.moe.tensor_layer import TensorExpertLayer
from moetune.runtime.parallel.dense_gradients import DenseGradients
from moetune.runtime.parallel.gradients import average_experts
from moetune.runtime.parallel.replicas import equalize, spread_layers

Model = TypeVar("Model", bound=nn.Module)
_ATTRIBUTE = "_moetune_gradients"


def replicate(
    model: Model,
    schedule: GradientSchedule | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> Model:
    """Average gradients over data-parallel ranks while the link is idle, and return the model.

    An alternative to DistributedDataParallel for models with experts; all ranks call it. Dense
    parameters and buffers get the first rank's values, and every backward pass ends with their
    gradients averaged over the ranks. Experts are treated as by `prepare_ddp`: a step equals one on
    the whole batch.

    The first backward pass reduces all gradients at its end, and records the order in which they
    are made. The later ones follow the schedule. Parameters that are not used contribute zeros:
    one that no rank uses has a gradient of zeros, where DistributedDataParallel leaves None.

    Args:
        schedule: as `moetune.plan_gradients` finds it; None sends what each dense part has made
            behind the last combine of the next MoE layer's backward phase.
        group: default the world. It contains the ranks of each `MoELayer`.

    Raises:
        InputError: the model is replicated or wrapped already, has DTensors or tensor-parallel
            experts within the group, or a layer is spread over ranks outside of it.
        RankMismatchError: the ranks have different parameters or schedules; the same on all.
    """
    if hasattr(model, _ATTRIBUTE):
        raise InputError("the model is replicated already", "call moetune.replicate once")
    members = None if group is None else dist.get_process_group_ranks(group)
    communicator = new_communicator(members, purpose="dense gradients")
    _check_layers(model, communicator)
    experts = average_experts(model, group)
    dense = {name: each for name, each in model.named_parameters() if name not in experts}
    _check_parameters(dense, communicator, schedule)
    equalize([*dense.values(), *model.buffers()], communicator)
    setattr(model, _ATTRIBUTE, DenseGradients(model, dense, communicator, schedule))
    return model


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Sum gradients on this rank alone, for all but the last of several backward passes.

    Raises:
        InputError: `replicate` was not called with the model.
    """
    gradients = dense_gradients_of(model)
    before, gradients.is_synced = gradients.is_synced, False
    try:
        yield
    finally:
        gradients.is_synced = before


@contextlib.contextmanager
def batches_of(model: nn.Module) -> Iterator[None]:
    """Run the backward passes of two batches in turns, and average their sum at the end.

    Raises:
        InputError: a plan of the gradients is being recorded.
    """
    gradients = _found(model)
    with gradients.of_batches(BATCHES_IN_TURNS) if gradients else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def unreduced(model: nn.Module) -> Iterator[None]:
    """Sum gradients on this rank alone: `no_sync` of a model that may have no replicas.

    Raises:
        InputError: a plan of the gradients is being recorded.
    """
    if gradients := _found(model):
        gradients.refuse_recording()
    with no_sync(model) if gradients else contextlib.nullcontext():
        yield


def dense_gradients_of(model: nn.Module) -> DenseGradients:
    """Return the gradients of a replicated model.

    Raises:
        InputError: `replicate` was not called with it.
    """
    gradients = _found(model)
    if gradients is None:
        raise InputError("the model is not replicated", "call moetune.replicate(model) first")
    return gradients


def _found(model: nn.Module) -> DenseGradients | None:
    gradients = getattr(model, _ATTRIBUTE, None)
    return gradients if isinstance(gradients, DenseGradients) else None


def _check_layers(model: nn.Module, communicator: Communicator) -> None:
    for name, layer in spread_layers(model):
        shared = set(layer.communicator.members) & set(communicator.members)
        if isinstance(layer, TensorExpertLayer) and len(shared) > 1:
            raise InputError(
                f"{name} has the same tokens on ranks {sorted(shared)}, which are to have replicas",
                "give the group of ranks with different tokens",
            )


def _check_parameters(
    dense: Mapping[str, nn.Parameter],
    communicator: Communicator,
    schedule: GradientSchedule | None,
) -> None:
    for name, parameter in dense.items():
        if is_dtensor(parameter):
            raise InputError(
                f"{name} is a DTensor, whose replicas are not known",
                "replicate a model of plain parameters; for sharded ones use fully_shard",
            )
    if communicator.num_ranks > 1:
        found = [
            f"{name} {tuple(each.shape)} {each.dtype} {each.requires_grad}"
            for name, each in dense.items()
        ]
        pieces = () if schedule is None else schedule.pieces
        agree_on_digest(communicator, digest((*found, pieces)), "models and schedules", None)
