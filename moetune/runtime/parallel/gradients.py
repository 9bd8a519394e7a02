"""Data-parallel gradients of a model with experts: for DistributedDataParallel, and for stages.

`prepare_ddp` is for users' own training loops; `stages` sums gradients in buffers.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from moetune.comm.gloo import communicator_of, new_communicator
from moetune.comm.process_group import GroupCommunicator
from moetune.comm.transfer import Transfer
from moetune.runtime.moe.all_to_all import AllToAllLayer
from moetune.runtime.moe.executor import GradientMean
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
    ignored += [name for name in average_experts(model, group) if name not in ignored]
    model._ddp_params_and_buffers_to_ignore = ignored  # type: ignore[assignment] # noqa: SLF001 - the name torch reads
    return model


def average_experts(model: nn.Module, group: dist.ProcessGroup | None) -> list[str]:
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
        if not isinstance(layer, AllToAllLayer):
            continue
        found += (names[id(each)] for each in layer.experts.parameters())
        members = layer.communicator.members
        if members not in means:
            means[members] = _mean_over(group, layer)
        layer.experts.gradients = means[members]
        equalize(layer.experts.parameters(), means[members].replicas)
    return found


def _mean_over(group: dist.ProcessGroup | None, layer: AllToAllLayer) -> GradientMean:
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


class GradientBuffer:
    """The gradients of some parameters in one buffer, summed by one all-reduce.

    Args:
        parameters: of one dtype, in the same order on all ranks.
        group: the ranks with replicas of the parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        first = parameters[0]
        self._buffer = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self._communicator = communicator_of(group)
        self._views = [
            (parameter, part.view_as(parameter))
            for parameter, part in zip(parameters, self._buffer.split(sizes), strict=True)
        ]

    def begin(self) -> None:
        """Zero the buffer and make the parameters' gradients its views."""
        self._buffer.zero_()
        for parameter, view in self._views:
            parameter.grad = view

    def all_reduce(self) -> Transfer:
        """Start summing the ranks' gradients."""
        return self._communicator.all_reduce(self._buffer, "the sum of the gradients")


def gradient_buffers(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup
) -> list[GradientBuffer]:
    """Return one buffer for every dtype; none for a group of one rank."""
    if dist.get_world_size(group) == 1:
        return []
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
    return [GradientBuffer(same, group) for same in by_dtype.values()]
