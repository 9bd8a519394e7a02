"""ZeRO by FSDP2: parameters, gradients and an optimizer's states of stages are in shards.

What all ranks of a stage have is sharded over them, and experts over their replicas; experts that
a plan has placed stay whole, because FSDP2 writes them in the order of the ranks. With ZeRO
stage 3 blocks are gathered one by one for each of their passes, and gradients are reduce-scattered
behind every micro-batch. With stage 1 parameters stay gathered and gradients whole until the last
micro-batch has ended. Gradients are sums over the ranks: the loss has its share of the global batch
already.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from moetune.domain.errors import InputError
from moetune.runtime.moe.executor import GradientMean
from moetune.runtime.parallel.fsdp import shard_experts
from moetune.runtime.parallel.groups import ParallelGroups
from moetune.runtime.parallel.replicas import spread_layers

_SHARDS_PARAMETERS = 3
_LISTS = nn.ModuleList, nn.ModuleDict


def shard_fully(parts: nn.ModuleList, ranks: ParallelGroups) -> list[nn.Module]:
    """Shard this rank's stages, and return them as `PipelineStage` takes them; a collective.

    Raises:
        InputError: an expert's sizes do not divide by its replicas.
        CollectiveError: a rank left.
    """
    again = ranks.layout.zero == _SHARDS_PARAMETERS
    mesh = DeviceMesh.from_group(ranks.whole, ranks.mesh.device_type, mesh_dim_names=("stage",))
    for part in parts:
        shard_experts(part, mesh, {"reshard_after_forward": again}, keeps_placed=not again)
        whole = set[nn.Parameter]()
        for _, layer in spread_layers(part):
            layer.experts.gradients = GradientMean()
            if layer.experts.placement.order:
                whole |= {*layer.experts.parameters()}
        for unit in (*_blocks_of(part), part):
            fully_shard(unit, mesh=mesh, reshard_after_forward=again, ignored_params=whole)
    for module in sharded_modules(parts):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(enable=True)
    return [Hidden(part, keeps_whole=not again) for part in parts]


def is_sharded(ranks: ParallelGroups) -> bool:
    """Return whether a stage's parameters are sharded: over several ranks, with a ZeRO stage."""
    return ranks.layout.zero > 0 and dist.get_world_size(ranks.whole) > 1


def sharded_modules(parts: nn.Module) -> Iterator[FSDPModule]:
    """Yield the modules that FSDP2 gathers and shards."""
    return (module for module in parts.modules() if isinstance(module, FSDPModule))


def forget_failed_passes(parts: nn.ModuleList) -> None:
    """Drop what a step that an error has ended left in FSDP2; a collective.

    Raises:
        InputError: torch is older than 2.13, which cannot.
    """
    for part in parts:
        assert isinstance(part, FSDPModule)  # noqa: S101 - of `shard_fully`
        if not hasattr(part, "reset_iter_state"):
            raise InputError(
                f"torch {torch.__version__} cannot train shards on behind a failed step",
                "start again from a checkpoint, or plan with --zero 0",
            )
        part.reset_iter_state()
    for module in sharded_modules(parts):
        module.unshard()
        for parameter in parts.parameters():
            parameter.grad = None
        module.reshard()


def _blocks_of(part: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of the outermost lists, which are a model's blocks."""
    for child in part.children():
        if isinstance(part, _LISTS) and not isinstance(child, _LISTS):
            yield child
        else:
            yield from _blocks_of(child)


class Hidden(nn.Module):
    """A part that torch's pipeline schedules do not take for one of FSDP2.

    They would shard the stages that are not next, and gather them again for each micro-batch.

    Args:
        keeps_whole: whether gathered parameters and whole gradients stay until the end of a step,
            as `PipelineStage` has it for modules of FSDP2.
    """

    def __init__(self, part: nn.Module, *, keeps_whole: bool) -> None:
        super().__init__()
        self.part, self.keeps_whole = part, keeps_whole

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        """Return the part's output."""
        outputs: torch.Tensor = self.part(*args, **kwargs)
        return outputs
