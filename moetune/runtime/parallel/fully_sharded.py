"""ZeRO stage 3 by FSDP2: parameters, gradients and an optimizer's states are in shards.

Blocks are gathered one by one, for each of their passes, and gradients are reduce-scattered behind
every micro-batch (torch's `fully_shard`, with `reshard_after_forward`). What all ranks of a stage
have is sharded over them, and experts over their replicas. Gradients are sums over the ranks, as
those of `zero` are: the loss has its share of the global batch already.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from moetune.runtime.moe.executor import GradientMean
from moetune.runtime.moe.local_parts import is_dtensor
from moetune.runtime.parallel.buckets import blocks_of
from moetune.runtime.parallel.fsdp import prepare_fsdp
from moetune.runtime.parallel.groups import ParallelGroups
from moetune.runtime.parallel.parameter_buffer import ShardPiece
from moetune.runtime.parallel.replicas import spread_layers


class ShardedParameters:
    """This rank's shards of parameters: `Stages` and the optimizer take them as buffers."""

    is_sharded = True
    copies = 1

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    def begin(self) -> None:
        """Drop the gradients of the last step."""
        for parameter in self._parameters:
            parameter.grad = None

    @property
    def sums(self) -> list[torch.Tensor]:
        """The summed gradients that this rank has."""
        grads = (_local_grad(one) for one in self._parameters)
        return [grad for grad in grads if grad is not None]

    def square(self) -> torch.Tensor:
        """Return Σ g² of `sums` in float64."""
        squares = (torch.linalg.vector_norm(one, dtype=torch.float64).square() for one in self.sums)
        return torch.stack([*squares]).sum() if self.sums else torch.zeros((), dtype=torch.float64)

    def pieces(self) -> Iterator[ShardPiece]:
        """Yield what this rank's optimizer updates."""
        for parameter in self._parameters:
            yield ShardPiece(_local(parameter), lambda one=parameter: _local_grad(one))  # type: ignore[misc]

    def gather(self) -> None:
        """Return at once: parameters are gathered where they are used."""

    def wait(self) -> None:
        """Return at once."""


def shard_fully(parts: nn.ModuleList, ranks: ParallelGroups) -> list[ShardedParameters]:
    """Shard this rank's stages; all ranks call this together.

    Raises:
        InputError: an expert's sizes do not divide by its replicas.
        CollectiveError: a rank left.
    """
    kind = ranks.mesh.device_type
    mesh = DeviceMesh.from_group(ranks.whole, kind, mesh_dim_names=("stage",))
    for part in parts:
        prepare_fsdp(part, mesh, reshard_after_forward=True)
        for _, layer in spread_layers(part):
            layer.experts.gradients = GradientMean()
        for unit in (*blocks_of(part), part):
            fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(enable=True)
    parameters = [one for one in parts.parameters() if one.requires_grad]
    return [ShardedParameters(parameters)]


def is_fully_sharded(ranks: ParallelGroups) -> bool:
    """Return whether a stage's parameters are sharded: over several ranks, with ZeRO stage 3."""
    return getattr(ranks.layout, "zero", 0) == 3 and dist.get_world_size(ranks.whole) > 1  # noqa: PLR2004


class Hidden(nn.Module):
    """A part that torch's `PipelineStage` does not take for one of FSDP2.

    There torch would hold whole gradients until the last micro-batch.
    """

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        """Return the part's output."""
        found: torch.Tensor = self.part(*args, **kwargs)
        return found


def _local(value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return value.to_local() if is_dtensor(value) else value.detach()


def _local_grad(parameter: nn.Parameter) -> torch.Tensor | None:
    return None if parameter.grad is None else _local(parameter.grad)
