"""Process groups of a layout: pipeline, data, tensor and expert parallelism.

This is the first step of training a planned model: `join` makes the groups on every rank. Stages
and layers of experts communicate in them.

All ranks of a stage have different tokens, and experts are spread over groups of ep ranks. With the
dispatcher `all_gather` the tensor-parallel ranks have the same tokens and share the experts.
"""

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moetune.comm.gloo import communicator_of
from moetune.comm.group import Communicator
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.domain.layout import divisor_words
from moetune.domain.plan import SAFE_DECISION, Decision
from moetune.domain.target_rules import layout_rules
from moetune.domain.targets import find_target
from moetune.domain.training import Degrees, FoldedLayout
from moetune.runtime.moe.layer import ExpertLayer, MoELayer, TensorExpertLayer
from moetune.runtime.moe.planned_layer import PlannedLayer


def _groups(
    named: Mapping[str, torch.Tensor], device_type: str, timeout: dt.timedelta | None
) -> dict[str, dist.ProcessGroup]:
    """Make this rank's groups, and connect the ranks of each, in the same order on all ranks.

    NCCL connects a group's ranks in its first collective, which would otherwise be in a pass.

    Args:
        named: rows of ranks by name; each row is a group, and equal rows are the same group.
        device_type: device type of the tensors that travel in the groups.
    """
    by_rows: dict[str, dist.ProcessGroup] = {}
    for name, rows in named.items():
        listed = rows.tolist()
        key = str(sorted(listed))
        if key not in by_rows:
            group, _ = dist.new_subgroups_by_enumeration(
                listed, timeout=timeout, group_desc=f"moetune: {name}"
            )
            assert group is not None  # noqa: S101 - the rows have all ranks
            zero = torch.zeros((), device=device_type)
            communicator_of(group).all_reduce(zero, f"the first exchange in {name}").wait()
            by_rows[key] = group
    return {name: by_rows[str(sorted(rows.tolist()))] for name, rows in named.items()}


def expert_rows(layout: FoldedLayout, ranks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ranks that share experts, in rows, and the ranks with the same experts, in rows.

    Args:
        ranks: (pp, dp, tp).
    """
    cut = ranks if layout.tp > 1 else ranks.reshape(layout.pp, -1, layout.ep)
    return ranks.reshape(-1, layout.ep), cut.movedim(1, -1).flatten(0, 1)


_DIMS = ("pp", "dp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelGroups:
    """This rank's process groups in a layout.

    Activations travel in "pp", partial sums of layers in "tp", tokens in "experts", and gradients
    and parameters in the others. Groups with the same ranks are the same group, except that
    gradients never share a group with activations, partial sums or tokens.

    Args:
        mesh: ("pp", "dp", "tp"); tp is innermost and has consecutive ranks, which share a node.
        spread: ("replicas", "experts") of this stage: the ranks with the same experts as this rank,
            and the ranks over which a layer's experts are spread.
        whole: the ranks over which gradients of all other parameters are summed.
    """

    layout: FoldedLayout
    mesh: DeviceMesh
    spread: DeviceMesh
    whole: dist.ProcessGroup

    @property
    def expert_communicator(self) -> Communicator:
        """The ranks over which a layer's experts are spread."""
        return communicator_of(self.spread.get_group("experts"))

    @property
    def replica(self) -> int:
        """This rank's index in "dp": the part of the global batch that it trains on."""
        return self.mesh.get_local_rank("dp")

    def stages(self) -> tuple[int, ...]:
        """Return the indices of this rank's stages, which are every pp-th stage."""
        layout, place = self.layout, self.mesh.get_local_rank("pp")
        return tuple(range(place, layout.num_stages, layout.pp))

    def expert_layer(self, shape: LayerShape, **options: Any) -> ExpertLayer:  # noqa: ANN401
        """Return a layer of experts of the layout's kind, over this rank's group.

        Args:
            options: further arguments of `MoELayer` or `TensorExpertLayer`.
        """
        is_tensor = self.layout.dispatcher == "all_gather" and self.layout.ep > 1
        options = {"device": self.mesh.device_type} | options
        layer = (TensorExpertLayer if is_tensor else MoELayer)(
            shape.d_model, shape.d_hidden, shape.num_experts, shape.top_k,
            activation=shape.activation, mesh=self.spread, **options,
        )  # fmt: skip
        self.pin(layer)
        return layer

    def pin(self, layer: PlannedLayer) -> None:
        """Make a layer over this rank's group of experts run as the layout says."""
        layer.pin(_decision(self.layout))


def _decision(layout: FoldedLayout) -> Decision:
    """Return the decision with the layout's degree; InputError for chunks without a degree."""
    degrees = layout.degree or Degrees.of_both(1)
    if layout.overlap == "chunks" and layout.degree is None:
        raise InputError(
            "overlap chunks without a degree", "give FoldedLayout(degree=…), as a plan has it"
        )
    return SAFE_DECISION.with_degree(degrees.common)


def join(
    layout: FoldedLayout, *, device_type: str = "cpu", timeout: dt.timedelta | None = None
) -> ParallelGroups:
    """Make the groups of a layout; all ranks of the world call this together.

    Args:
        timeout: timeout of every wait for the other ranks; the default is torch's.

    Raises:
        InputError: the layout has another number of ranks than the world (the text has sizes that
            fit), or this runtime cannot run it.
    """
    sizes = layout.pp, layout.dp, layout.tp
    _check(layout, dist.get_world_size())
    ranks = torch.arange(dist.get_world_size(), device="cpu").view(sizes)
    experts, replicas = expert_rows(layout, ranks)
    rows = {name: ranks.movedim(dim, -1).flatten(0, -2) for dim, name in enumerate(_DIMS)}
    made = _groups(rows | {"experts": experts}, device_type, timeout)
    whole = ranks.movedim(1, -1).flatten(0, 1)
    gradients = _groups(
        {"replicas of experts": replicas, "ranks of a stage": whole}, device_type, timeout
    )
    spread = [gradients["replicas of experts"], made["experts"]]
    mine = experts.new_tensor(dist.get_process_group_ranks(spread[0]))
    return ParallelGroups(
        layout=layout, whole=gradients["ranks of a stage"],
        spread=DeviceMesh.from_group(
            spread, device_type, mesh=experts[torch.isin(experts, mine).any(dim=1)],
            mesh_dim_names=("replicas", "experts"),
        ),
        mesh=DeviceMesh.from_group(
            [made[name] for name in _DIMS], device_type, mesh=ranks, mesh_dim_names=_DIMS
        ),
    )  # fmt: skip


def _check(layout: FoldedLayout, world_size: int) -> None:
    """Raise InputError unless the layout fits the ranks and this runtime supports it."""
    if layout.world_size != world_size:
        raise InputError(
            f"the layout is for {layout.world_size} ranks, but there are {world_size}",
            f"start {layout.world_size} ranks, or plan for {world_size}",
        )
    if layout.stage_ranks % layout.ep:
        near = divisor_words(layout.stage_ranks, layout.ep)
        raise InputError(
            f"ep ({layout.ep}) does not divide dp ({layout.stage_ranks})", f"use ep {near}"
        )
    for broken in layout_rules(layout, find_target("moetune")):
        raise InputError(broken.what, broken.hint)
