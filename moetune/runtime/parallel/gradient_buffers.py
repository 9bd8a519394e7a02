"""Buffers of a rank's gradients, one for the ranks that each parameter is summed over."""

from collections.abc import Iterator

import torch.distributed as dist
from torch import nn

from moetune.comm.gloo import communicator_of
from moetune.domain.training import FoldedLayout
from moetune.runtime.moe.all_to_all import AllToAllLayer
from moetune.runtime.moe.tensor_layer import TensorExpertLayer
from moetune.runtime.parallel.groups import ParallelGroups
from moetune.runtime.parallel.tensor import TensorParallelModule
from moetune.runtime.parallel.zero import ParameterBuffer, parameter_buffers


def gradient_buffers(parts: nn.ModuleList, ranks: ParallelGroups) -> list[ParameterBuffer]:
    """Return buffers of gradients, by the ranks that they are summed over.

    Experts behind an all-to-all have gradients from their whole group's tokens already: their
    replicas have others. Parts of tensor-parallel layers, and of experts in a tensor-parallel
    group, are summed over the ranks with the same part; what all ranks have over those with other
    tokens.
    """
    layout = ranks.layout
    experts = [
        parameter
        for module in parts.modules()
        if isinstance(module, AllToAllLayer)
        for parameter in module.experts.parameters()
    ]
    cut = list(_cut_parameters(parts))
    mine = {id(parameter) for parameter in (*experts, *cut)}
    whole = [parameter for parameter in parts.parameters() if id(parameter) not in mine]
    is_sharded = isinstance(layout, FoldedLayout) and layout.zero > 0
    stage_ranks = ranks.mesh.size() // layout.pp
    return [
        *parameter_buffers(
            whole, communicator_of(ranks.whole), copies=stage_ranks, is_sharded=is_sharded
        ),
        *parameter_buffers(
            cut, communicator_of(ranks.cut), copies=stage_ranks // layout.tp, is_sharded=is_sharded
        ),
        *parameter_buffers(
            experts, communicator_of(ranks.replicas), copies=dist.get_world_size(ranks.replicas),
            is_sharded=is_sharded,
        ),
    ]  # fmt: skip


def _cut_parameters(parts: nn.ModuleList) -> Iterator[nn.Parameter]:
    """Yield the parameters of which tensor-parallel ranks have parts."""
    for module in parts.modules():
        if isinstance(module, TensorParallelModule):
            yield from (module.get_parameter(name) for name in module.cut)
        elif isinstance(module, TensorExpertLayer):
            yield from module.experts.parameters()
