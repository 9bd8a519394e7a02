"""The placement of a layer's experts: each rank's, and all of them as checkpoints see them.

Parameters are plain tensors with this rank's experts alone, so that any optimizer takes them
together with a model's other parameters. In state dicts, the layer's and the optimizer's, they are
DTensors of all experts, `Shard(0)` over the layer's group, which share the plain tensors' memory:
`torch.distributed.checkpoint` takes plain tensors of one name for replicas, and keeps one rank's.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist

from moetune.comm.group import Communicator
from moetune.comm.process_group import GroupCommunicator
from moetune.domain.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

EXPERTS = "experts"
"""Name of the mesh dimension over which experts are sharded."""


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """Return whether a value is a DTensor, without importing them where nobody has made one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_part(parameter: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return this rank's memory of a parameter, and its offsets in the whole."""
    if not is_dtensor(parameter):
        return parameter.detach(), (0,) * parameter.dim()
    (chunk,) = parameter.__create_chunk_list__()
    with torch.no_grad():
        local: torch.Tensor = parameter.to_local()
    return local, tuple(chunk.offsets)


def cut(whole: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Return the part of a tensor at the offsets."""
    for dim, (offset, size) in enumerate(zip(offsets, shape, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlacement:
    """Experts in the order of the ranks, equally many each.

    Args:
        num_experts: of all ranks.
        rank: this one's index in the group.
        members: the group's ranks in the world, in order.
        group: None for one rank, or for a communicator that is no process group.
    """

    num_experts: int
    rank: int
    members: tuple[int, ...]
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, communicator: Communicator, num_experts: int) -> "ExpertPlacement":
        """Return the placement of experts over a communicator's ranks."""
        return cls(
            num_experts=num_experts, rank=communicator.rank, members=communicator.members,
            group=communicator.group if isinstance(communicator, GroupCommunicator) else None,
        )  # fmt: skip

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return len(self.members)

    @property
    def num_local(self) -> int:
        """Experts of each rank."""
        return self.num_experts // self.num_ranks

    @property
    def first(self) -> int:
        """This rank's first expert."""
        return self.rank * self.num_local

    def distribute(self, local: torch.Tensor) -> torch.Tensor:
        """Return a DTensor of all experts (E, …) in the memory of this rank's.

        Args:
            local: (E / ranks, …).

        Raises:
            InputError: the layer's communicator is no process group.
        """
        from torch.distributed.tensor import DTensor, Shard

        return DTensor.from_local(local, self._mesh(local), [Shard(0)], run_check=False)

    def own_part(self, value: torch.Tensor, name: str) -> torch.Tensor:
        """Return this rank's experts of a state dict's value.

        Args:
            value: a DTensor, as `distribute` made it on a rank of this index in a group of this
                size, or a plain tensor of all experts, as in a layer on one rank.
            name: of the value, for errors.

        Raises:
            InputError: it is of one of several ranks, of another one or one that it does not tell.
        """
        if is_dtensor(value):
            return self._own_part_of(value, name)
        num_found = len(value) if value.dim() else 0
        if num_found == self.num_experts:
            return value[self.first : self.first + self.num_local]
        if num_found == self.num_local:
            raise InputError(
                f"{name} has {num_found} of {self.num_experts} experts, and does not tell of which "
                f"of the {self.num_ranks} ranks",
                "load the state dict that the layer gives, or one with all experts",
            )
        return value  # torch names both shapes in its error

    def _own_part_of(self, value: "DTensor", name: str) -> torch.Tensor:
        mesh = value.device_mesh
        # A mesh from a file still has the coordinate of the rank that wrote the file.
        is_own = tuple(mesh.get_coordinate() or ()) == (self.rank,)
        if is_own and mesh.size() == self.num_ranks and value.placements[0].is_shard(0):
            local: torch.Tensor = value.to_local()
            return local
        raise InputError(
            f"{name} is a DTensor {value.placements} at {mesh.get_coordinate()} of {mesh}, and "
            f"this is rank {self.rank} of {self.num_ranks}",
            "load it with torch.distributed.checkpoint, which moves experts between ranks",
        )

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks' group.

        Raises:
            InputError: the layer's communicator is no process group.
        """
        if self.group is None:
            raise InputError(
                "DTensors of several ranks' experts need a process group, and the layer's "
                "communicator is none",
                "give the layer a group or a mesh",
            )
        return self.group

    def _mesh(self, local: torch.Tensor) -> "DeviceMesh":
        from torch.distributed.device_mesh import DeviceMesh

        group, kind = self.process_group, local.device.type
        if local.is_meta:
            kind = group._device_types[0].type  # noqa: SLF001 - torch has no public name
        return DeviceMesh.from_group(group, kind, mesh_dim_names=(EXPERTS,))
