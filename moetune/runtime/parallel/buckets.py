"""Buckets of a rank's parameters: those of consecutive blocks, reduced and gathered at once.

In the order of the forward pass, so that a bucket's gradients are reduced beside the backward
passes of the blocks before it, and its values gathered beside their forward passes.
"""

from collections.abc import Collection, Iterator, Sequence

import torch.distributed as dist
from torch import nn

from moetune.comm.gloo import communicator_of
from moetune.comm.group import Communicator
from moetune.domain.buckets import bucket_ends
from moetune.domain.training import FoldedLayout
from moetune.runtime.moe.all_to_all import AllToAllLayer
from moetune.runtime.moe.tensor_layer import TensorExpertLayer
from moetune.runtime.parallel.groups import ParallelGroups
from moetune.runtime.parallel.parameter_buffer import ParameterBuffer, parameter_buffers
from moetune.runtime.parallel.tensor import TensorParallelModule


def blocks_of(part: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of the outermost lists, which are a model's blocks."""
    for child in part.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from child.children()
        else:
            yield from blocks_of(child)


def units_of(part: nn.Module) -> list[list[nn.Parameter]]:
    """Return the parameters with gradients that a stage uses one after the other.

    Those of each block, those of what is registered before the blocks, and those of all else.
    """
    blocks = [list(block.parameters()) for block in blocks_of(part)]
    inside = {id(one) for parameters in blocks for one in parameters}
    before: list[nn.Parameter] = []
    behind: list[nn.Parameter] = []
    side = before
    for parameter in part.parameters():
        if id(parameter) in inside:
            side = behind
        else:
            side.append(parameter)
    known: set[int] = set()
    units = []
    for parameters in (before, *blocks, behind):
        own = [one for one in parameters if one.requires_grad and id(one) not in known]
        known |= {id(one) for one in own}
        if own:
            units.append(own)
    return units


def parameter_buckets(parts: nn.ModuleList, ranks: ParallelGroups) -> list[ParameterBuffer]:
    """Return buckets of a rank's parameters, in the order of the forward pass.

    Experts behind an all-to-all have gradients from their whole group's tokens already: their
    replicas have others. Parts of tensor-parallel layers, and of experts in a tensor-parallel
    group, are summed over the ranks with the same part; what all ranks have over those with other
    tokens.

    Args:
        parts: all stages of this rank.
    """
    layout = ranks.layout
    units = [unit for part in parts for unit in units_of(part)]
    is_sharded = isinstance(layout, FoldedLayout) and layout.zero > 0
    stage_ranks = ranks.mesh.size() // layout.pp
    experts = {
        id(parameter)
        for module in parts.modules()
        if isinstance(module, AllToAllLayer)
        for parameter in module.experts.parameters()
    }
    cut = {id(parameter) for parameter in _cut_parameters(parts)} - experts
    whole = {id(one) for unit in units for one in unit} - cut - experts
    found: list[tuple[int, ParameterBuffer]] = []
    for members, group, copies in (
        (whole, ranks.whole, stage_ranks),
        (cut, ranks.cut, stage_ranks // layout.tp),
        (experts, ranks.replicas, dist.get_world_size(ranks.replicas)),
    ):
        communicator = communicator_of(group)
        for first, parameters in _runs(units, members, communicator):
            made = parameter_buffers(parameters, communicator, copies=copies, is_sharded=is_sharded)
            found += ((first, buffer) for buffer in made)
    return [buffer for _, buffer in sorted(found, key=lambda pair: pair[0])]


def _runs(
    units: Sequence[Sequence[nn.Parameter]], members: Collection[int], communicator: Communicator
) -> Iterator[tuple[int, list[nn.Parameter]]]:
    """Yield the members of each bucket, with the number of the first unit that has any."""
    own = [[one for one in unit if id(one) in members] for unit in units]
    ends = bucket_ends([sum(one.nbytes for one in unit) for unit in own])
    if communicator.num_ranks == 1:
        ends = ends[-1:]
    for start, end in zip((0, *ends), ends, strict=False):
        run = [number for number in range(start, end) if own[number]]
        yield run[0], [one for number in run for one in own[number]]


def _cut_parameters(parts: nn.ModuleList) -> Iterator[nn.Parameter]:
    """Yield the parameters of which tensor-parallel ranks have parts."""
    for module in parts.modules():
        if isinstance(module, TensorParallelModule):
            yield from (module.get_parameter(name) for name in module.cut)
        elif isinstance(module, TensorExpertLayer):
            yield from module.experts.parameters()
