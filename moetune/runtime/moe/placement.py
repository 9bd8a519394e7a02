"""Places of a layer's experts: on each rank, and in checkpoints, which have all of them.

Parameters are plain tensors with only this rank's experts, so that any optimizer takes them
together with a model's other parameters. In state dicts of layers and optimizers they are DTensors
of all experts, `Shard(0)` over the layer's group. These share the plain tensors' memory.
`torch.distributed.checkpoint` would take plain tensors of the same name for replicas, and keep a
single rank's.

If a plan has placed the experts in another order, making a state dict moves them to the natural
order, and loading moves them back. A checkpoint does not record where its experts were.
"""

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeGuard

import torch
import torch.distributed as dist

from moetune.comm.group import Communicator
from moetune.comm.process_group import GroupCommunicator, no_pickle
from moetune.domain.errors import InputError
from moetune.domain.placement import places_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

EXPERTS = "experts"
"""Name of the mesh dimension over which experts are sharded."""
StateKind = Literal["parameters", "optimizer"]
"""The content of a state dict."""
EXPERTS_OF: Mapping[StateKind, str] = MappingProxyType(
    {"parameters": "experts", "optimizer": "the optimizer of experts"}
)
_MOST_WATCHED = 64


class StateCopies:
    """The copies of experts in state dicts, and whether somebody has written into them.

    `torch.distributed.checkpoint.load` writes into the tensors of a state dict. For experts in the
    natural order these are the parameters themselves. Copies have to be loaded into the layer.
    """

    def __init__(self) -> None:
        self._watched: dict[StateKind, deque[tuple[torch.Tensor, int]]] = {}

    def add(self, kind: StateKind, copy: torch.Tensor) -> None:
        """Watch a copy; its memory is still freed with the state dict."""
        watched = copy.detach()  # counts the writes of all that share the copy's memory
        watched.data = copy.new_empty(0)
        of_kind = self._watched.setdefault(kind, deque(maxlen=_MOST_WATCHED))
        of_kind.append((watched, _num_writes(watched)))

    def forget(self, kind: StateKind) -> None:
        """Stop watching copies of this kind, because their values are being loaded."""
        self._watched.pop(kind, None)

    def check(self) -> None:
        """Raise InputError if a copy was written into and not loaded."""
        for kind, copies in self._watched.items():
            if any(_num_writes(watched) != before for watched, before in copies):
                self.forget(kind)
                raise InputError(
                    f"values were written into a state dict of {EXPERTS_OF[kind]}, and not loaded "
                    "into the layer: a plan has placed its experts, and the state dict has copies",
                    "call load_state_dict, or set_state_dict, after "
                    "torch.distributed.checkpoint.load",
                )


def _num_writes(tensor: torch.Tensor) -> int:
    return tensor._version  # noqa: SLF001 - torch has no public name


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlacement:
    """The places of experts on ranks; each rank has the same number of experts.

    Args:
        num_experts: experts of all ranks.
        rank: this rank's index in the group.
        members: the group's ranks in the world, in order.
        group: None for one rank, or for a communicator that is no process group.
        order: the expert of each place; rank r has the r-th of equal parts. Empty for the natural
            order.
    """

    num_experts: int
    rank: int
    members: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    order: tuple[int, ...] = ()
    copies: StateCopies = field(default_factory=StateCopies, compare=False, repr=False)

    @classmethod
    def of(
        cls, communicator: Communicator, num_experts: int, order: tuple[int, ...] = ()
    ) -> "ExpertPlacement":
        """Return the placement of experts over a communicator's ranks."""
        is_natural = order == tuple(range(num_experts)) or communicator.num_ranks == 1
        return cls(
            num_experts=num_experts, rank=communicator.rank, members=communicator.members,
            group=communicator.group if isinstance(communicator, GroupCommunicator) else None,
            order=() if is_natural else order,
        )  # fmt: skip

    def __deepcopy__(self, _: object) -> "ExpertPlacement":
        """Return a copy that shares the group, and watches its state dicts alone."""
        return replace(self, copies=StateCopies())

    def __getstate__(self) -> list[object]:
        """Return the fields; raise InputError for several ranks."""
        if self.group is not None:
            raise no_pickle()
        return [getattr(self, attribute.name) for attribute in fields(self)]

    @property
    def num_ranks(self) -> int:
        """The number of ranks in the group."""
        return len(self.members)

    @property
    def num_local(self) -> int:
        """The number of experts on each rank."""
        return self.num_experts // self.num_ranks

    @property
    def first(self) -> int:
        """This rank's first place; in the natural order also its first expert."""
        return self.rank * self.num_local

    @property
    def experts(self) -> tuple[int, ...]:
        """This rank's experts."""
        order = self.order or range(self.num_experts)
        return tuple(order[self.first : self.first + self.num_local])

    def check_natural(self, what: str) -> None:
        """Raise InputError if a plan has placed the experts.

        Args:
            what: names what writes checkpoints, for the error.
        """
        if self.order:
            raise InputError(
                f"{what} writes checkpoints with the experts in the order of the ranks, and a plan "
                "has placed this layer's otherwise",
                "plan with --expert-placement natural, or use DistributedDataParallel",
            )

    def local_part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a parameter that has all experts in the natural order."""
        if self.order:
            return whole[list(self.experts)]
        return whole[self.first : self.first + self.num_local]

    def distribute(self, local: torch.Tensor, kind: StateKind = "parameters") -> torch.Tensor:
        """Return a DTensor of all experts (E, …) that uses the memory of `local`.

        If the experts are not in the natural order, all ranks exchange them, and `local` is copied.

        Args:
            local: this rank's experts (E / ranks, …).
            kind: kind of the state dict.

        Raises:
            InputError: the layer's communicator is no process group.
        """
        from torch.distributed.tensor import DTensor, Shard

        if self.order and local.is_meta:
            local = local.new_empty((self.num_experts // self.num_ranks, *local.shape[1:]))
        elif self.order:
            local = _moved(local, places_of(self.order), self.process_group)
            self.copies.add(kind, local)
        return DTensor.from_local(local, self._mesh(local), [Shard(0)], run_check=False)

    def part_of(
        self, value: torch.Tensor, what: str, kind: StateKind = "parameters"
    ) -> torch.Tensor:
        """Return this rank's experts from a state dict's value.

        If the experts are not in the natural order, all ranks exchange a DTensor's experts.

        Args:
            value: a DTensor that `distribute` made on this rank of a group of this size, or a plain
                tensor of all experts, as in a layer on one rank.
            what: names the value, for errors.
            kind: kind of the state dict.

        Raises:
            InputError: the value has the experts of a single, another or an unknown rank.
        """
        self.copies.forget(kind)
        if is_dtensor(value):
            part = self._part_of_dtensor(value, what)
            if not self.order:
                return part
            if part.is_meta:
                return part.new_empty((self.num_local, *part.shape[1:]))
            return _moved(part, self.order, self.process_group)
        num_given = len(value) if value.dim() else 0
        if num_given == self.num_experts:
            return self.local_part(value)
        if num_given == self.num_local:
            raise InputError(
                f"{what} has {num_given} of {self.num_experts} experts, and does not tell of which "
                f"of the {self.num_ranks} ranks",
                "load the state dict that the layer gives, or a state dict of all experts",
            )
        return value  # torch names both shapes in its error

    def _part_of_dtensor(self, value: "DTensor", what: str) -> torch.Tensor:
        from torch.distributed.tensor import Shard

        mesh = value.device_mesh
        # A mesh from a file still has the coordinate of the rank that wrote the file.
        is_here = tuple(mesh.get_coordinate() or ()) == (self.rank,)
        if is_here and mesh.size() == self.num_ranks and list(value.placements) == [Shard(0)]:
            local: torch.Tensor = value.to_local()
            return local
        raise InputError(
            f"{what} is a DTensor {value.placements} at {mesh.get_coordinate()} of {mesh}, and "
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


def _moved(local: torch.Tensor, sources: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Exchange rows into another order, and return this rank's; all ranks call this.

    Args:
        local: (rows, …), with the same number of rows on each rank.
        sources: for each row of all ranks' results, its row in all ranks' `local`.
    """
    communicator = GroupCommunicator(group)
    num_ranks, rank = communicator.num_ranks, communicator.rank
    before, after = len(local), len(sources) // num_ranks
    of_rank = [sources[peer * after : (peer + 1) * after] for peer in range(num_ranks)]
    first = rank * before
    leaving = [[row - first for row in rows if first <= row < first + before] for rows in of_rank]
    mine = of_rank[rank]
    arriving = sorted(range(after), key=lambda row: (mine[row] // before, row))
    froms = [row // before for row in mine]
    given, taken = list(map(len, leaving)), list(map(froms.count, range(num_ranks)))
    held = local.detach().to(_sent_from(group, local))
    picked = held[[row for rows in leaving for row in rows]]
    sent = picked.reshape(len(picked), held[0].numel()).view(torch.uint8)  # backends lack dtypes
    received = sent.new_empty((after, sent.shape[1]))
    communicator.all_to_all(received, sent, taken, given, "the move of experts' states").wait()
    moved = held.new_empty((after, *held.shape[1:]))
    moved[arriving] = received.view(held.dtype).view_as(moved)
    return moved.to(local.device)


def _sent_from(group: dist.ProcessGroup, local: torch.Tensor) -> torch.device:
    """Return the tensor's device, or a device that the group's backend can send from."""
    kinds = {device.type for device in group._device_types}  # noqa: SLF001 - torch has no public name
    return local.device if local.device.type in kinds else GroupCommunicator(group).device


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """Return whether a value is a DTensor, without importing the class if nobody else has."""
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
    """Return the part of a tensor with this shape at these offsets."""
    for dim, (offset, size) in enumerate(zip(offsets, shape, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole
