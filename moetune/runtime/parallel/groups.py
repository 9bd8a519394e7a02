"""Process groups of a layout: pipeline, data, tensor and expert parallelism.

First step of training a planned model: `join` makes them on every rank. Stages, tensor-parallel
layers and layers of experts communicate in them.
"""

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moetune.comm.gloo import communicator_of
from moetune.comm.group import Communicator
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.domain.layout import Layout, check_ranks
from moetune.runtime.moe.expert_layer import ExpertLayer
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.moe.tensor_layer import TensorExpertLayer

_DIMS = ("pp", "dp", "tp")
_LAYERS: Mapping[str, type[ExpertLayer]] = MappingProxyType(
    {"all_to_all": MoELayer, "tensor": TensorExpertLayer}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelGroups:
    """This rank's process groups in a layout.

    Activations travel in "pp", gradients in "dp" and `replicas`, partial sums of layers in "tp",
    tokens in `experts`. With ep = dp, `experts` is the group "dp" itself, one communicator: all
    ranks issue the gradients' all-reduce after the last exchange of tokens.

    Args:
        mesh: ("pp", "dp", "tp"), tp innermost: consecutive ranks, which share a node.
        experts: the group that the experts of a layer are spread over.
        replicas: the ranks with the same experts as this one.
    """

    layout: Layout
    mesh: DeviceMesh
    experts: dist.ProcessGroup
    replicas: dist.ProcessGroup

    @property
    def tensor_communicator(self) -> Communicator:
        """The tensor-parallel group."""
        return communicator_of(self.mesh.get_group("tp"))

    @property
    def replica(self) -> int:
        """This rank's index in "dp": the part of the global batch that it trains on."""
        return self.mesh.get_local_rank("dp")

    def stages(self, stages_per_rank: int = 1) -> tuple[int, ...]:
        """Return the indices of this rank's stages: one in pp consecutive ones."""
        place, pp = self.mesh.get_local_rank("pp"), self.layout.pp
        return tuple(place + pp * turn for turn in range(stages_per_rank))

    def expert_layer(self, shape: LayerShape, **options: Any) -> ExpertLayer:  # noqa: ANN401
        """Return a layer of experts of the layout's kind, over this rank's group.

        Args:
            options: further arguments of `MoELayer` or `TensorExpertLayer`.
        """
        return _LAYERS[self.layout.expert_parallel](
            shape.d_model, shape.d_hidden, shape.num_experts, shape.top_k,
            activation=shape.activation, group=self.experts, device=self.mesh.device_type,
            **options,
        )  # fmt: skip


def join(
    layout: Layout,
    *,
    device_type: str = "cpu",
    timeout: dt.timedelta | None = None,
    mesh: DeviceMesh | None = None,
) -> ParallelGroups:
    """Make the groups of a layout; all ranks of the world call this together.

    Args:
        timeout: of every wait for the other ranks; default, torch's.
        mesh: has the groups already, in dimensions "pp", "dp" and "tp"; then only groups of
            experts within "dp" are made, where 1 < ep < dp. Its device type replaces the argument.

    Raises:
        InputError: the layout has another number of ranks than the world, with sizes that fit in
            the text, or than the mesh.
    """
    check_ranks(layout, dist.get_world_size())
    ranks = torch.arange(dist.get_world_size()).view(layout.pp, layout.dp, layout.tp)
    if mesh is not None:
        ranks = _ranks_of(mesh, layout)

    def group(name: str, rows: torch.Tensor) -> dist.ProcessGroup:
        mine: dist.ProcessGroup
        mine, _ = dist.new_subgroups_by_enumeration(
            rows.tolist(), timeout=timeout, group_desc=f"moetune: {name}"
        )
        return mine

    groups = {
        name: mesh.get_group(name) if mesh else group(name, ranks.movedim(dim, -1).flatten(0, 1))
        for dim, name in enumerate(_DIMS)
    }
    experts, replicas = groups["tp"], groups["dp"]
    if layout.expert_parallel == "all_to_all":
        cut = ranks.view(layout.pp, -1, layout.ep, layout.tp)
        experts = groups["dp"]
        if layout.ep != layout.dp:
            experts = group("experts", cut.movedim(2, -1).flatten(0, 2))
        if layout.ep > 1:
            replicas = group("replicas of experts", cut.movedim(1, -1).flatten(0, 2))
    if mesh is None:
        mesh = DeviceMesh.from_group(
            list(groups.values()), device_type, mesh=ranks, mesh_dim_names=tuple(groups)
        )
    return ParallelGroups(layout=layout, mesh=mesh, experts=experts, replicas=replicas)


def _ranks_of(mesh: DeviceMesh, layout: Layout) -> torch.Tensor:
    """Return the mesh's ranks (pp, dp, tp)."""
    sizes = (layout.pp, layout.dp, layout.tp)
    if mesh.mesh_dim_names != _DIMS or tuple(mesh.mesh.shape) != sizes:
        raise InputError(
            f"the mesh has dimensions {mesh.mesh_dim_names} of sizes {tuple(mesh.mesh.shape)}, the "
            f"layout {_DIMS} of {sizes}",
            f'use init_device_mesh("{mesh.device_type}", {sizes}, mesh_dim_names={_DIMS})',
        )
    return mesh.mesh
