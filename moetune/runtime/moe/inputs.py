"""Checks of what a layer is given: its arguments, and the tokens of each step.

`planned_layer` asks these before ranks agree on a step, so that a rank's problem reaches them all.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.runtime.moe.expert_module import LocalExperts
from moetune.runtime.moe.local_parts import is_dtensor

_MESH_DIMS = 2
"""Replicas and experts."""


def expert_group(mesh: DeviceMesh, other: object) -> dist.ProcessGroup:
    """Return the ranks of a mesh that the experts are spread over.

    Args:
        other: was given beside the mesh.

    Raises:
        InputError: the mesh has more dimensions than experts and replicas, or is not alone.
    """
    if other is not None:
        raise InputError("give one of mesh, group and communicator")
    if mesh.ndim > _MESH_DIMS:
        raise InputError(
            f"mesh has {mesh.ndim} dimensions, {mesh.mesh_dim_names}; experts are spread over one",
            'take one of them, or two with the replicas first, as in mesh["replicas", "experts"]',
        )
    experts: dist.ProcessGroup = mesh.get_group(mesh.ndim - 1)
    return experts


def input_problem(
    x: torch.Tensor, dtype: torch.dtype, *, shape: LayerShape, experts: LocalExperts
) -> str:
    """Return why the experts cannot take a step's tokens; "" if they can.

    Args:
        dtype: that the step computes in.
    """
    if not x.dim() or x.shape[-1] != shape.d_model:
        return f"x has shape {tuple(x.shape)}, its last size must be {shape.d_model}"
    weight = experts.w1
    # FSDP2 moves what it gathers from the host.
    if x.device.type != weight.device.type and not is_dtensor(weight):
        return f"x is on {x.device}, the experts are on {weight.device}"
    is_cast = experts.compute_dtype or torch.is_autocast_enabled(x.device.type)
    if dtype != weight.dtype and not is_cast:
        return f"x is {x.dtype}, the experts are {weight.dtype}"
    return ""


def input_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype that experts compute a step's tokens in, that of autocast where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
