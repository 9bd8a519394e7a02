"""Buckets of a rank's parameters: those of consecutive blocks, reduced and gathered at once.

In the order of the forward pass, so that a bucket's gradients are reduced beside the backward
passes of the blocks before it, and its values gathered beside their forward passes.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from moetune.comm.gloo import communicator_of
from moetune.comm.group import Communicator
from moetune.domain.training import FoldedLayout
from moetune.runtime.moe.all_to_all import AllToAllLayer
from moetune.runtime.moe.tensor_layer import TensorExpertLayer
from moetune.runtime.parallel.groups import ParallelGroups
from moetune.runtime.parallel.tensor import TensorParallelModule
from moetune.runtime.parallel.zero import ParameterBuffer, parameter_buffers

LEAST_BYTES = 2**20
"""Below it a collective's start takes longer than its bytes; torch's DDP begins with as many."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of a stage that is called at once: a block, or what is beside the blocks.

    Args:
        parameters: with gradients.
        before: modules before whose forward pass the parameters' values are there.
        behind: modules behind whose forward pass they are.
    """

    parameters: Sequence[nn.Parameter]
    before: Sequence[nn.Module] = ()
    behind: Sequence[nn.Module] = ()


def blocks_of(part: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of the outermost lists, which are a model's blocks."""
    for child in part.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from child.children()
        else:
            yield from blocks_of(child)


def units_of(part: nn.Module) -> list[Unit]:
    """Return the units of a stage in the order of its forward pass.

    A block's parameters are used in its forward pass, or in that of its modules. A stage says by
    `used_behind_blocks` which others no module uses before its last block has run, and by
    `reads_blocks` that it uses a block's parameters elsewhere: it is one unit then.
    """
    blocks = [] if getattr(part, "reads_blocks", False) else [*blocks_of(part)]
    behind: Collection[int] = getattr(part, "used_behind_blocks", ()) if blocks else ()
    inside = [[one for one in block.parameters() if one.requires_grad] for block in blocks]
    of_blocks = {id(one) for each in inside for one in each}
    beside = [one for one in part.parameters() if one.requires_grad and id(one) not in of_blocks]
    units = [Unit([one for one in beside if id(one) not in behind], before=[part])]
    known: set[int] = set()
    for block, parameters in zip(blocks, inside, strict=True):
        own = [one for one in parameters if id(one) not in known]
        known |= {id(one) for one in own}
        units.append(Unit(own, before=[block, *_owners(block)]))
    units.append(Unit([one for one in beside if id(one) in behind], behind=blocks[-1:]))
    return [unit for unit in units if unit.parameters]


def _owners(block: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules within a block that have parameters: a model may call them alone."""
    for module in block.modules():
        if module is not block and next(module.parameters(recurse=False), None) is not None:
            yield module


def parameter_buckets(
    parts: nn.ModuleList, units: Sequence[Unit], ranks: ParallelGroups
) -> list[ParameterBuffer]:
    """Return buckets of the units' parameters, in the order of the units.

    Experts behind an all-to-all have gradients from their whole group's tokens already: their
    replicas have others. Parts of tensor-parallel layers, and of experts in a tensor-parallel
    group, are summed over the ranks with the same part; what all ranks have over those with other
    tokens.

    Args:
        parts: all stages of this rank.
        units: of them.
    """
    layout = ranks.layout
    is_sharded = isinstance(layout, FoldedLayout) and layout.zero > 0
    stage_ranks = ranks.mesh.size() // layout.pp
    experts = {
        id(parameter)
        for module in parts.modules()
        if isinstance(module, AllToAllLayer)
        for parameter in module.experts.parameters()
    }
    cut = {id(parameter) for parameter in _cut_parameters(parts)} - experts
    whole = {id(one) for unit in units for one in unit.parameters} - cut - experts
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


def wait_before_use(units: Sequence[Unit], buckets: Sequence[ParameterBuffer]) -> None:
    """Let each unit wait for the values of its parameters where they are gathered."""
    for unit in units:
        own = {id(one) for one in unit.parameters}
        needed = [
            bucket for bucket in buckets
            if bucket.is_sharded and any(id(one) in own for one in bucket.parameters)
        ]  # fmt: skip
        if not needed:
            continue

        def wait(*_: object, needed: Sequence[ParameterBuffer] = needed) -> None:
            for bucket in needed:
                bucket.wait()

        for module in unit.before:
            module.register_forward_pre_hook(wait)
        for module in unit.behind:
            module.register_forward_hook(wait)


def _runs(
    units: Sequence[Unit], members: Collection[int], communicator: Communicator
) -> Iterator[tuple[int, list[nn.Parameter]]]:
    """Yield the members of consecutive units, with the number of the first unit."""
    run: list[nn.Parameter] = []
    first = size = 0
    for number, unit in enumerate(units):
        own = [one for one in unit.parameters if id(one) in members]
        if not own:
            continue
        first = first if run else number
        run += own
        size += sum(one.nbytes for one in own)
        if size >= LEAST_BYTES and communicator.num_ranks > 1:
            yield first, run
            run, size = [], 0
    if run:
        yield first, run


def _cut_parameters(parts: nn.ModuleList) -> Iterator[nn.Parameter]:
    """Yield the parameters of which tensor-parallel ranks have parts."""
    for module in parts.modules():
        if isinstance(module, TensorParallelModule):
            yield from (module.get_parameter(name) for name in module.cut)
        elif isinstance(module, TensorExpertLayer):
            yield from module.experts.parameters()
