"""Find the data-parallel replicas of a layer's experts."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moetune.comm.agree import agree
from moetune.comm.group import Communicator
from moetune.domain.errors import InputError
from moetune.runtime.moe.planned_layer import PlannedLayer


def spread_layers(model: nn.Module) -> Iterator[tuple[str, PlannedLayer]]:
    """Yield the layers, by name, whose experts are spread over several ranks."""
    for name, module in model.named_modules():
        if isinstance(module, PlannedLayer) and module.communicator.num_ranks > 1:
            yield name, module


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
    found = data_parallel.all_gather_object(members, "the search for replicas of experts")
    groups = tuple(dict.fromkeys(found))
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


def equalize(parameters: Iterable[torch.Tensor], replicas: Communicator) -> None:
    """Replace the values of replicas by those of the first one, as wrappers do with all others."""
    if replicas.num_ranks == 1:
        return
    with torch.no_grad():
        for parameter in parameters:
            if not parameter.is_meta:
                replicas.broadcast(parameter.detach(), "the first values of experts").wait()
