"""Data-parallel gradients of a model with experts, for DistributedDataParallel."""

import torch.distributed as dist
from torch import nn

from moetune.comm.gloo import communicator_of, new_communicator
from moetune.comm.process_group import GroupCommunicator
from moetune.runtime.moe.executor import GradientMean
from moetune.runtime.moe.planned_layer import PlannedLayer
from moetune.runtime.parallel.replicas import (
    check_placements,
    equalize,
    expert_groups,
    mesh_of_replicas,
    spread_layers,
)


def prepare_ddp(model: nn.Module, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Make `model` ready for DistributedDataParallel and return it; all ranks call this.

    The wrapper then ignores the experts of a `MoELayer` on several ranks, which are no replicas.
    Their gradients are sums over the ranks' tokens already, while the wrapper averages the others'.
    Scaled by 1 / ranks of the group, and summed over the experts' own replicas where there are any,
    they fit the same learning rate, and a step equals one on the whole batch. Replicas get the
    values of the first one, as the wrapper does with everything else.

    Args:
        group: the wrapper's, default the world. It contains the ranks of each `MoELayer`.

    Raises:
        InputError: a layer is spread over ranks outside of the group.
        RankMismatchError: replicas of experts have different places; the same on all ranks.
    """
    ignored = list(getattr(model, "_ddp_params_and_buffers_to_ignore", []))
    ignored += [name for name in _average_experts(model, group) if name not in ignored]
    model._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment] # noqa: SLF001 - the name torch reads
    return model


def _average_experts(model: nn.Module, group: dist.ProcessGroup | None) -> list[str]:
    """Make the gradients of experts on several ranks means over the group; all ranks call this.

    Returns:
        The names of their parameters.

    Raises:
        InputError: a layer is spread over ranks outside of the group.
        RankMismatchError: replicas of experts have different places; the same on all ranks.
    """
    if dist.is_available() and dist.is_initialized():
        check_placements(model, GroupCommunicator(group))
    names = {id(each): name for name, each in model.named_parameters()}
    found: list[str] = []
    means: dict[tuple[int, ...], GradientMean] = {}
    for _, layer in spread_layers(model):
        if layer.expert_parallel != "all_to_all":
            continue
        found += (names[id(each)] for each in layer.experts.parameters())
        members = layer.communicator.members
        if members not in means:
            means[members] = _mean_over(group, layer)
        layer.experts.gradients = means[members]
        equalize(layer.experts.parameters(), means[members].replicas)
    return found


def _mean_over(group: dist.ProcessGroup | None, layer: PlannedLayer) -> GradientMean:
    """Return what makes means over the group of the gradients of layers like this one."""
    data_parallel = GroupCommunicator(group)
    groups = expert_groups(layer, data_parallel)
    mesh = mesh_of_replicas(layer, groups)
    if mesh is None:
        replicas = new_communicator(
            [each[layer.communicator.rank] for each in groups], purpose="replicas of experts"
        )
    else:
        replicas = communicator_of(mesh.get_group(0))
    return GradientMean(scale=1 / data_parallel.num_ranks, replicas=replicas)
