"""Process groups of a layout: pipeline, data, tensor and expert parallelism.

First step of training a planned model: `join` makes them on every rank. Stages and layers of
experts communicate in them.

Layouts are of two kinds. In a `FoldedLayout`, of training plans, all ranks of a stage meet tokens
of their own, and experts are spread over any ep of them. In a `Layout`, of plans for the papers'
models, tensor-parallel ranks have the same tokens.
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
from moetune.domain.layout import Layout, check_ranks, nearest_divisors
from moetune.domain.pipeline import Schedule, rank_of_stage
from moetune.domain.plan import Decision
from moetune.domain.target_rules import layout_rules
from moetune.domain.targets import find_target
from moetune.domain.training import Degrees, FoldedLayout
from moetune.runtime.moe.layer import ExpertLayer, MoELayer, TensorExpertLayer
from moetune.runtime.moe.planned_layer import PlannedLayer
from moetune.runtime.parallel.group_rows import GroupsByRows, expert_rows

_DIMS = ("pp", "dp", "tp")
_LAYERS: Mapping[str, type[ExpertLayer]] = MappingProxyType(
    {"all_to_all": MoELayer, "tensor": TensorExpertLayer}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelGroups:
    """This rank's process groups in a layout.

    Activations travel in "pp", partial sums of layers in "tp", tokens in `experts`, gradients and
    parameters in the others: groups with the same ranks are one, but of these last ones none is
    one of the first.

    Args:
        mesh: ("pp", "dp", "tp"), tp innermost: consecutive ranks, which share a node.
        experts: the group that the experts of a layer are spread over.
        replicas: the ranks with the same experts as this one.
        whole: the ranks whose gradients of all other parameters are summed.
    """

    layout: Layout | FoldedLayout
    mesh: DeviceMesh
    experts: dist.ProcessGroup
    replicas: dist.ProcessGroup
    whole: dist.ProcessGroup

    @property
    def expert_communicator(self) -> Communicator:
        """The ranks that the experts of a layer are spread over."""
        return communicator_of(self.experts)

    @property
    def zero(self) -> int:
        """ZeRO stage of what the ranks of a stage have."""
        return self.layout.zero if isinstance(self.layout, FoldedLayout) else 0

    @property
    def replica(self) -> int:
        """This rank's index in "dp": the part of the global batch that it trains on."""
        return self.mesh.get_local_rank("dp")

    def stages(self, stages_per_rank: int | None = None) -> tuple[int, ...]:
        """Return the indices of this rank's stages: one in pp consecutive ones, or there and back.

        Args:
            stages_per_rank: 1 by default; a folded layout says it.
        """
        order: Schedule = "1f1b"
        if isinstance(self.layout, FoldedLayout):
            order, stages_per_rank = self.layout.order, self.layout.vpp
        place, pp = self.mesh.get_local_rank("pp"), self.layout.pp
        every = range(pp * (stages_per_rank or 1))
        return tuple(stage for stage in every if rank_of_stage(stage, pp, order) == place)

    def expert_layer(self, shape: LayerShape, **options: Any) -> ExpertLayer:  # noqa: ANN401
        """Return a layer of experts of the layout's kind, over this rank's group.

        Args:
            options: further arguments of `MoELayer` or `TensorExpertLayer`.
        """
        layout, kind = self.layout, "all_to_all"
        if isinstance(layout, Layout):
            kind = layout.expert_parallel
        options = {"device": self.mesh.device_type} | options
        layer = _LAYERS[kind](
            shape.d_model, shape.d_hidden, shape.num_experts, shape.top_k,
            activation=shape.activation, group=self.experts, **options,
        )  # fmt: skip
        if isinstance(layout, FoldedLayout):
            self.pin(layer)
        return layer

    def pin(self, layer: PlannedLayer) -> None:
        """Let a layer over this rank's group of experts run as a folded layout says."""
        if isinstance(self.layout, FoldedLayout):
            layer.pin(_decision(self.layout))


def _decision(layout: FoldedLayout) -> Decision:
    """Return in how many chunks a layer exchanges its tokens.

    Raises:
        InputError: overlap "chunks" without degrees, which the planner's answer has.
    """
    degree = layout.degree or Degrees(forward=1, backward=1)
    if layout.overlap == "chunks" and layout.degree is None:
        raise InputError(
            "overlap chunks without a degree", "give FoldedLayout(degree=…), as a plan has it"
        )
    return Decision(forward_degree=degree.forward, backward_degree=degree.backward)


def join(
    layout: Layout | FoldedLayout,
    *,
    device_type: str = "cpu",
    timeout: dt.timedelta | None = None,
    mesh: DeviceMesh | None = None,
) -> ParallelGroups:
    """Make the groups of a layout; all ranks of the world call this together.

    Args:
        timeout: of every wait for the other ranks; default, torch's.
        mesh: has the groups already, in dimensions "pp", "dp" and "tp"; then only groups that
            cross these are made. Its device type replaces the argument.

    Raises:
        InputError: the layout has another number of ranks than the world, with sizes that fit in
            the text, or than the mesh; or this runtime cannot run it.
    """
    sizes = layout.pp, layout.dp, layout.tp
    if isinstance(layout, FoldedLayout):
        _check_folded(layout, dist.get_world_size())
    else:
        check_ranks(layout, dist.get_world_size())
    ranks = torch.arange(dist.get_world_size(), device="cpu").view(sizes)
    if mesh is not None:
        ranks = _ranks_of(mesh, sizes)
    made = GroupsByRows(timeout)
    for dim, name in enumerate(_DIMS):
        rows = ranks.movedim(dim, -1).flatten(0, -2)
        made.add(name, rows, None if mesh is None else mesh.get_group(name))
    experts, replicas = expert_rows(layout, ranks)
    gradients = GroupsByRows(timeout)
    return ParallelGroups(
        layout=layout, experts=made.add("experts", experts),
        replicas=gradients.add("replicas of experts", replicas),
        whole=gradients.add("ranks of a stage", ranks.movedim(1, -1).flatten(0, 1)),
        mesh=mesh or DeviceMesh.from_group(
            [made.named[name] for name in _DIMS], device_type, mesh=ranks, mesh_dim_names=_DIMS
        ),
    )  # fmt: skip


def _check_folded(layout: FoldedLayout, world_size: int) -> None:
    """Raise InputError unless the layout fits the ranks, and is one that this runtime offers."""
    if layout.world_size != world_size:
        raise InputError(
            f"the layout is for {layout.world_size} ranks, but there are {world_size}",
            f"start {layout.world_size} ranks, or plan for {world_size}",
        )
    if layout.stage_ranks % layout.ep:
        near = " or ".join(map(str, nearest_divisors(layout.stage_ranks, layout.ep)))
        raise InputError(
            f"ep ({layout.ep}) does not divide dp ({layout.stage_ranks})", f"use ep {near}"
        )
    if layout.dispatcher == "all_gather" and layout.ep > 1:
        instead = Layout(
            expert_parallel="tensor", dp=layout.dp, ep=1, tp=layout.tp, pp=layout.pp
        )  # fmt: skip
        raise InputError(
            "all_gather is for ranks that have the same tokens, and those of a FoldedLayout do not",
            f"join({instead})",
        )
    for broken in layout_rules(layout, find_target("moetune")):
        raise InputError(broken.what, broken.hint)


def _ranks_of(mesh: DeviceMesh, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return the mesh's ranks, one dimension for each of the layout's."""
    if mesh.mesh_dim_names != _DIMS or tuple(mesh.mesh.shape) != sizes:
        raise InputError(
            f"the mesh has dimensions {mesh.mesh_dim_names} of sizes {tuple(mesh.mesh.shape)}, the "
            f"layout {_DIMS} of {sizes}",
            f'use init_device_mesh("{mesh.device_type}", {sizes}, mesh_dim_names={_DIMS})',
        )
    return mesh.mesh
