"""Data-parallel replicas of a layer's experts, and their gradients for DistributedDataParallel."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from moetune.comm.agree import agree
from moetune.comm.gloo import communicator_of
from moetune.comm.group import Communicator, OneRank
from moetune.comm.process_group import GroupCommunicator
from moetune.domain.errors import InputError
from moetune.runtime.moe.planned_layer import PlannedLayer
from moetune.runtime.moe.weight_grads import GradientMean


def named_layers(model: nn.Module) -> list[tuple[str, PlannedLayer]]:
    """Return a model's expert layers by name."""
    return [(name, part) for name, part in model.named_modules() if isinstance(part, PlannedLayer)]


def spread_layers(model: nn.Module) -> list[tuple[str, PlannedLayer]]:
    """Return the expert layers whose experts are spread over several ranks, by name."""
    return [named for named in named_layers(model) if named[1].communicator.num_ranks > 1]


def owners_of(layers: Iterable[tuple[str, PlannedLayer]]) -> dict[int, PlannedLayer]:
    """Return the layer of each expert parameter, by the parameter's id."""
    return {id(value): layer for _, layer in layers for value in layer.experts.parameters()}


def expert_layers(model: nn.Module) -> dict[str, PlannedLayer]:
    """Return the layer of each parameter that expert-parallel ranks do not replicate, by name."""
    owners = owners_of(
        named for named in spread_layers(model) if named[1].expert_parallel == "all_to_all"
    )
    named = model.named_parameters()
    return {name: owners[id(value)] for name, value in named if id(value) in owners}


def replicas_of(layer: PlannedLayer, ranks: Sequence[int]) -> Communicator:
    """Return the ranks that have the same experts of a layer as this rank; a collective.

    Args:
        ranks: the data-parallel ranks, in the world. They train on different tokens, or on the same
            tokens with different experts.

    Raises:
        InputError: the layer and its replicas, from its mesh, are on other ranks.
        RankMismatchError: the replicas' experts have different places; raised equally on all ranks.
        CollectiveError: a rank left.
    """
    mesh, spread = layer.mesh, layer.communicator.members
    replicas: Communicator = OneRank()
    if mesh is not None and mesh.ndim > 1:
        replicas, spread = communicator_of(mesh.get_group(0)), tuple(mesh.mesh.flatten().tolist())
    if layer.expert_parallel == "tensor":  # whose ranks have the same tokens
        spread = replicas.members if replicas.num_ranks > 1 else (dist.get_rank(),)
    if set(spread) != set(ranks):
        raise InputError(
            f"a layer of experts and its replicas are on ranks {sorted(spread)}, and the "
            f"data-parallel ranks are {sorted(ranks)}",
            "give the layer mesh=init_device_mesh(device, (replicas, ranks), mesh_dim_names=("
            '"replicas", "experts")), over all data-parallel ranks',
        )
    agree(
        replicas, lambda: layer.experts.placement.order, lambda order: (str(order),),
        "the placement of experts",
    )  # fmt: skip
    return replicas


@torch.no_grad()
def equalize(
    values: Iterable[torch.Tensor], replicas: Communicator, *, device: str | None = None
) -> None:
    """Replace replicas' values with the first replica's, as wrappers do for other parameters.

    Args:
        device: device that the values travel on; the default is each value's device.
    """
    for value in values if replicas.num_ranks > 1 else ():
        if not value.is_meta:
            there = value.detach().to(device or value.device).contiguous()
            replicas.broadcast(there, "the first rank's values").wait()
            value.copy_(there)


def prepare_ddp(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Make `model` ready for DistributedDataParallel and return it; all ranks call this.

    The wrapper then ignores the experts of a `MoELayer` on several ranks, which are no replicas.
    Their gradients already sum over the ranks' tokens, while the wrapper averages all other
    gradients. They are scaled by 1 / ranks of the layer, and averaged over the experts' replicas if
    there are any. So they fit the same learning rate, and a step equals a step on the whole batch.
    Replicas get the first replica's values, and are averaged after the last micro-batch
    (`no_sync`), as other parameters.

    Args:
        group: the wrapper's group (default: world) with the ranks of each `MoELayer`, or of its
            mesh.

    Raises:
        InputError: a layer and its replicas are on other ranks than the group's.
        RankMismatchError: replicas of experts have different places; raised equally on all ranks.
    """
    has_group = dist.is_available() and dist.is_initialized()
    ranks = GroupCommunicator(group).members if has_group else OneRank.members
    layers = expert_layers(model)
    means: dict[tuple[int, ...], GradientMean] = {}
    for layer in dict.fromkeys(layers.values()):
        replicas, scale = replicas_of(layer, ranks), 1 / layer.communicator.num_ranks
        mean = GradientMean(scale=scale, replicas=replicas)
        layer.experts.gradients = means.setdefault(layer.communicator.members, mean)
        equalize(layer.experts.parameters(), replicas)
    ignored = list(getattr(model, "_ddp_params_and_buffers_to_ignore", []))
    ignored += [name for name in layers if name not in ignored]
    model._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment] # noqa: SLF001 - the name torch reads
    return model
