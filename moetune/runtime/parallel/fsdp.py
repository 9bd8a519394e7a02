"""FSDP2 for models with experts: each rank's experts are sharded over their replicas alone.

Pipeline stages are sharded like this with a ZeRO stage. ZeRO stage 3 gathers each block for each of
its passes, and reduce-scatters gradients after every micro-batch. With stage 1, parameters stay
gathered and gradients whole until the last micro-batch has ended. Experts that a plan has placed
stay whole, because FSDP2 writes them in the order of the ranks. Gradients are sums over the ranks,
because the loss is already scaled by its share of the global batch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from moetune.comm.gloo import group_of_this_rank
from moetune.domain.errors import InputError
from moetune.runtime.moe.expert_module import LocalExperts
from moetune.runtime.moe.placement import EXPERTS, is_dtensor, local_part
from moetune.runtime.moe.planned_layer import PlannedLayer
from moetune.runtime.moe.weight_grads import GradientMean
from moetune.runtime.parallel.groups import ParallelGroups
from moetune.runtime.replicas import equalize, replicas_of, spread_layers

_REPLICAS = "replicas"


def prepare_fsdp(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:  # noqa: ANN401
    """Make `model` ready for `fully_shard` and return it; all ranks of the mesh call this.

    Experts become DTensors, sharded over their layer's ranks, and over their replicas if the mesh
    has any. `fully_shard` leaves them unchanged, and shards everything else. Their gradients become
    means over the mesh, so that a step equals a step on the whole batch.

        moetune.prepare_fsdp(model, mesh)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    Args:
        mesh: the data-parallel mesh of `fully_shard`: it has the ranks of each `MoELayer`, or of
            its mesh.
        options: options of `fully_shard` for the experts: mp_policy (the default sums in float32 at
            least), offload_policy and reshard_after_forward.

    Raises:
        InputError: a layer and its replicas are on other ranks than the mesh's, its experts do not
            divide, or a plan has placed them.
        RankMismatchError: replicas of experts have different places; the same on all ranks.
        CollectiveError: a rank left.
    """
    shard_experts(model, mesh, options, keeps_placed=False)
    return model


def shard_experts(
    model: nn.Module, mesh: DeviceMesh, options: dict[str, Any], *, keeps_placed: bool
) -> None:
    """Make a model's experts DTensors, as `prepare_fsdp` does.

    Args:
        keeps_placed: experts that a plan has placed stay unchanged; otherwise they are refused.
    """
    ranks = mesh.mesh.flatten().tolist()
    meshes: dict[tuple[int, ...], tuple[DeviceMesh, DeviceMesh]] = {}
    for _, layer in spread_layers(model):
        placement, members = layer.experts.placement, layer.communicator.members
        if is_dtensor(layer.experts.up) or (keeps_placed and placement.order):
            continue
        same_experts = replicas_of(layer, ranks)
        placement.check_natural("FSDP2")
        if members not in meshes:
            meshes[members] = _expert_mesh(layer, mesh.device_type)
        replicas, spread = meshes[members]
        if not layer.experts.up.is_meta:
            layer.experts.module.to(mesh.device_type)
        equalize(layer.experts.parameters(), same_experts)
        _distribute(layer.experts, spread)
        # The gate's gradient is a mean over ranks, experts' gradients sum their group's tokens.
        num_summed = len(members) if layer.expert_parallel == "all_to_all" else 1
        layer.experts.gradients = GradientMean(scale=1 / num_summed)
        layer.experts.compute_dtype = _fully_shard(layer.experts, replicas, options)


def _distribute(experts: LocalExperts, mesh: DeviceMesh) -> None:
    """Make the parameters DTensors that use the same memory."""
    for name, parameter in tuple(experts.module.named_parameters()):
        whole = DTensor.from_local(parameter.detach(), mesh, [Shard(0)], run_check=False)
        setattr(experts.module, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def _fully_shard(
    experts: LocalExperts, replicas: DeviceMesh, given: dict[str, Any]
) -> torch.dtype | None:
    """Shard experts over their replicas, and return the dtype in which they compute.

    Without replicas nothing is sharded: FSDP2 would copy all parameters before each use.
    """
    policy = given.get("mp_policy") or sums_in_float32(experts.parameters())
    # The layer casts tokens itself, and combine weights stay float32.
    policy = replace(policy, cast_forward_inputs=False, output_dtype=None)
    options = given | {"mp_policy": policy}
    is_whole = replicas.size() == 1
    is_whole = is_whole and not isinstance(options.get("offload_policy"), CPUOffloadPolicy)
    ignored = set(experts.parameters()) if is_whole else None
    fully_shard(
        experts.module, mesh=replicas, ignored_params=ignored,
        shard_placement_fn=lambda parameter: _placement(parameter, replicas.size()),
        **options,
    )  # fmt: skip
    dtype: torch.dtype | None = policy.param_dtype
    return dtype


def sums_in_float32(parameters: Iterable[torch.Tensor]) -> MixedPrecisionPolicy:
    """Return FSDP2's policy; sums of two-byte gradients would be rounded at every rank."""
    is_narrow = any(parameter.element_size() < torch.float32.itemsize for parameter in parameters)
    return MixedPrecisionPolicy(reduce_dtype=torch.float32 if is_narrow else None)


def _placement(parameter: nn.Parameter, num_replicas: int) -> Shard:
    """Return the first dimension that divides evenly, which is whole experts if possible.

    Raises:
        InputError: no dimension divides; torch's checkpoints would misplace uneven shards.
    """
    shape = local_part(parameter)[0].shape
    for dim, size in enumerate(shape):
        if size % num_replicas == 0:
            return Shard(dim)
    raise InputError(
        f"experts of shape {tuple(shape)} on each rank cannot be sharded evenly over "
        f"{num_replicas} replicas",
        "spread the experts over more ranks, so that there are fewer replicas",
    )


def _expert_mesh(layer: PlannedLayer, device_type: str) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the dimensions of replicas and of experts, from the layer's mesh if it has both."""
    mesh = layer.mesh
    if mesh is None or mesh.ndim == 1:
        rows = torch.tensor([layer.communicator.members], device="cpu")
        groups = [group_of_this_rank(_REPLICAS), layer.experts.placement.process_group]
        names = _REPLICAS, EXPERTS
        mesh = DeviceMesh.from_group(groups, device_type, mesh=rows, mesh_dim_names=names)
    replicas, experts = mesh.mesh_dim_names or ()
    return mesh[replicas], mesh[experts]


_SHARDS_PARAMETERS = 3
_LISTS = nn.ModuleList, nn.ModuleDict


def shard_fully(parts: nn.ModuleList, ranks: ParallelGroups) -> list[nn.Module]:
    """Shard this rank's stages, and return the parts for `PipelineStage`; a collective.

    Raises:
        InputError: no size of an expert divides by the number of its replicas.
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
            fully_shard(
                unit, mesh=mesh, reshard_after_forward=again, ignored_params=whole,
                mp_policy=sums_in_float32(set(unit.parameters()) - whole),
            )  # fmt: skip
    for module in sharded_modules(parts):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(enable=True)
    return [_Hidden(part) if again else part for part in parts]


def is_sharded(ranks: ParallelGroups) -> bool:
    """Return whether a stage's parameters are sharded: with ZeRO, over several ranks."""
    return ranks.layout.zero > 0 and dist.get_world_size(ranks.whole) > 1


def sharded_modules(parts: nn.Module) -> Iterator[FSDPModule]:
    """Yield the modules that FSDP2 gathers and shards."""
    return (module for module in parts.modules() if isinstance(module, FSDPModule))


def forget_failed_passes(parts: Iterable[nn.Module]) -> None:
    """Drop the state that a failed step left in FSDP2; a collective.

    Args:
        parts: root modules of FSDP2.

    Raises:
        InputError: torch is older than 2.13, and cannot do this.
    """
    for part in parts:
        assert isinstance(part, FSDPModule)  # noqa: S101 - of `fully_shard`
        if not hasattr(part, "reset_iter_state"):
            raise InputError(
                f"torch {torch.__version__} cannot train shards on behind a failed step",
                "start again from a checkpoint, or plan with --zero 0",
            )
        part.reset_iter_state()
        for module in sharded_modules(part):
            module.unshard()
            for parameter in part.parameters():
                parameter.grad = None
            module.reshard()


def _blocks_of(part: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of the outermost lists, which are a model's blocks."""
    for child in part.children():
        if isinstance(part, _LISTS) and not isinstance(child, _LISTS):
            yield child
        else:
            yield from _blocks_of(child)


class _Hidden(nn.Module):
    """A wrapper that hides from torch's pipeline that a part is FSDP2's.

    The pipeline keeps FSDP2's gathered parameters and whole gradients until a step ends.
    """

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        """Return the part's output."""
        outputs: torch.Tensor = self.part(*args, **kwargs)
        return outputs
