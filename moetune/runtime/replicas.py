"""Data-parallel replicas of a layer's experts, and their gradients for DistributedDataParallel."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moetune.comm.agree import agree
from moetune.comm.gloo import communicator_of, new_communicator
from moetune.comm.group import Communicator, OneRank
from moetune.comm.process_group import GroupCommunicator
from moetune.domain.errors import InputError
from moetune.runtime.moe.planned_layer import PlannedLayer
from moetune.runtime.moe.weight_grads import GradientMean


def spread_layers(model: nn.Module) -> Iterator[tuple[str, PlannedLayer]]:
    """Yield the layers, by name, whose experts are spread over several ranks."""
    for name, module in model.named_modules():
        if isinstance(module, PlannedLayer) and module.communicator.num_ranks > 1:
            yield name, module


def expert_layers(model: nn.Module) -> dict[str, PlannedLayer]:
    """Return the layer of each parameter that expert-parallel ranks do not replicate, by name."""
    owners = {
        id(parameter): layer
        for _, layer in spread_layers(model)
        if layer.expert_parallel == "all_to_all"
        for parameter in layer.experts.parameters()
    }
    return {
        name: owners[id(parameter)]
        for name, parameter in model.named_parameters()
        if id(parameter) in owners
    }


def expert_groups(layer: PlannedLayer, data_parallel: Communicator) -> tuple[tuple[int, ...], ...]:
    """Return the ranks in the world of every group that has a copy of the layer; a collective.

    Ranks of one place in their groups have the same experts.

    Args:
        data_parallel: the ranks that train on different tokens, or on the same ones with other
            experts. Those of an all-to-all layer are whole groups.

    Raises:
        InputError: the group of a `MoELayer` is not within the data-parallel ranks.
    """
    members = layer.communicator.members
    gathered = data_parallel.all_gather_object(members, "the search for replicas of experts")
    groups = tuple(dict.fromkeys(gathered))
    outside = set().union(*groups) - set(data_parallel.members)
    if layer.expert_parallel == "all_to_all" and outside:
        raise InputError(
            f"a layer of experts is spread over ranks {list(members)}, which are not all among "
            f"the data-parallel ranks {list(data_parallel.members)}",
            "give a group or mesh that contains the layer's",
        )
    return groups


def check_placements(model: nn.Module, data_parallel: Communicator) -> None:
    """Check that replicas of a layer have their experts in the same places; a collective.

    Raises:
        RankMismatchError: they have not; the same on all ranks.
        CollectiveError: a rank left.
    """
    if data_parallel.num_ranks > 1:
        agree(
            data_parallel,
            lambda: spread_layers(model),
            lambda layers: [f"{name}: {layer.experts.placement.order}" for name, layer in layers],
            "the placement of experts",
        )


def mesh_of_replicas(layer: PlannedLayer, groups: tuple[tuple[int, ...], ...]) -> DeviceMesh | None:
    """Return the mesh of replicas and experts that the layer was made with, if it has all groups.

    Args:
        groups: of `expert_groups`.
    """
    mesh = layer.mesh
    if mesh is None or mesh.ndim == 1:
        return None
    return mesh if {tuple(row) for row in mesh.mesh.tolist()} == set(groups) else None


@torch.no_grad()
def equalize(
    values: Iterable[torch.Tensor], replicas: Communicator, *, device: str | None = None
) -> None:
    """Replace values of replicas by those of the first one, as wrappers do with all others.

    Args:
        device: that they travel on; default, each value's own.
    """
    for value in values if replicas.num_ranks > 1 else ():
        if not value.is_meta:
            there = value.detach().to(device or value.device).contiguous()
            replicas.broadcast(there, "the first rank's values").wait()
            value.copy_(there)


def prepare_ddp(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Make `model` ready for DistributedDataParallel and return it; all ranks call this.

    The wrapper then ignores the experts of a `MoELayer` on several ranks, which are no replicas.
    Their gradients are sums over the ranks' tokens already, while the wrapper averages the others'.
    Scaled by 1 / ranks of the layer, and averaged over the experts' own replicas where there are
    any, they fit the same learning rate, and a step equals one on the whole batch. Replicas get the
    values of the first one, and are averaged behind the last micro-batch (`no_sync`), as the
    wrapper does with everything else.

    Args:
        group: the wrapper's, default the world. It contains the ranks of each `MoELayer`.

    Raises:
        InputError: a layer is spread over ranks outside of the group.
        RankMismatchError: replicas of experts have different places; the same on all ranks.
    """
    has_group = dist.is_available() and dist.is_initialized()
    data_parallel = GroupCommunicator(group) if has_group else OneRank()
    check_placements(model, data_parallel)
    layers = expert_layers(model)
    means: dict[tuple[int, ...], GradientMean] = {}
    for layer in dict.fromkeys(layers.values()):
        members = layer.communicator.members
        if members not in means:
            means[members] = _mean_over(data_parallel, layer)
        layer.experts.gradients = means[members]
        equalize(layer.experts.parameters(), means[members].replicas)
    ignored = list(getattr(model, "_ddp_params_and_buffers_to_ignore", []))
    ignored += [name for name in layers if name not in ignored]
    model._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment] # noqa: SLF001 - the name torch reads
    return model


def _mean_over(data_parallel: Communicator, layer: PlannedLayer) -> GradientMean:
    """Return what makes means of the gradients of layers like this one."""
    groups = expert_groups(layer, data_parallel)
    mesh = mesh_of_replicas(layer, groups)
    if mesh is None:
        replicas = new_communicator(
            [group[layer.communicator.rank] for group in groups], purpose="replicas of experts"
        )
    else:
        replicas = communicator_of(mesh.get_group(0))
    return GradientMean(scale=1 / layer.communicator.num_ranks, replicas=replicas)
