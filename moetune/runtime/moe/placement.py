"""Places of a layer's experts: each rank's, and all of them as checkpoints see them.

Parameters are plain tensors with this rank's experts alone, so that any optimizer takes them
together with a model's other parameters. In state dicts, the layer's and the optimizer's, they are
DTensors of all experts, `Shard(0)` over the layer's group, which share the plain tensors' memory:
`torch.distributed.checkpoint` takes plain tensors of one name for replicas, and keeps one rank's.

Where each expert's width is cut, too (`width`), they are sharded over both dimensions of a mesh.

Experts that a plan has placed otherwise travel to their places in the natural order when a state
dict is made, and back when one is loaded: a checkpoint does not tell where its experts were.
"""

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeGuard

import torch
import torch.distributed as dist

from moetune.comm.group import Communicator
from moetune.comm.process_group import GroupCommunicator
from moetune.domain.errors import InputError
from moetune.domain.placement import EMPTY, has_replicas, places_of, replicas_of
from moetune.runtime.moe.width import WHOLE, WIDTH, ExpertWidth

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

StateKind = Literal["parameters", "optimizer"]
"""Content of a state dict."""
_WORDS: Mapping[StateKind, str] = MappingProxyType(
    {"parameters": "experts", "optimizer": "the optimizer of experts"}
)
_MOST_WATCHED = 64
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


def local_parts(parameter: torch.Tensor) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    """Return this rank's memory of a parameter in parts of the whole, and their offsets in it."""
    if not is_dtensor(parameter):
        return [local_part(parameter)]
    from torch.distributed.checkpoint.metadata import MetadataIndex

    with torch.no_grad():
        return [
            (parameter.__get_tensor_shard__(MetadataIndex("", chunk.offsets)), tuple(chunk.offsets))
            for chunk in parameter.__create_chunk_list__()
        ]


def cut(whole: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Return the part of a tensor at the offsets."""
    for dim, (offset, size) in enumerate(zip(offsets, shape, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


class StateCopies:
    """Copies of experts that state dicts were given, and whether somebody has written into them.

    `torch.distributed.checkpoint.load` writes into the tensors of a state dict. Those of experts in
    the natural order are the parameters themselves, copies have to be loaded again.
    """

    def __init__(self) -> None:
        self._watched: dict[StateKind, deque[tuple[torch.Tensor, int]]] = {}

    def add(self, kind: StateKind, copy: torch.Tensor) -> None:
        """Watch a copy, whose memory is freed with the state dict."""
        watched = copy.detach()  # counts the writes of all that share the copy's memory
        watched.data = copy.new_empty(0)
        of_kind = self._watched.setdefault(kind, deque(maxlen=_MOST_WATCHED))
        of_kind.append((watched, watched._version))  # noqa: SLF001 - torch has no public name

    def forget(self, kind: StateKind) -> None:
        """Watch no more: values of this kind are being loaded."""
        self._watched.pop(kind, None)

    def check(self) -> None:
        """Raise InputError where a copy was written into, and not loaded."""
        for kind, copies in self._watched.items():
            if any(watched._version != version for watched, version in copies):  # noqa: SLF001
                self.forget(kind)
                raise InputError(
                    f"values were written into a state dict of {_WORDS[kind]}, and not loaded into "
                    "the layer: a plan has placed its experts, and the state dict has copies",
                    "call load_state_dict, or set_state_dict, after "
                    "torch.distributed.checkpoint.load",
                )


def _sent_from(group: dist.ProcessGroup, local: torch.Tensor) -> torch.device:
    """Return the tensor's device, or one whose values the group's backend can send."""
    kinds = {device.type for device in group._device_types}  # noqa: SLF001 - torch has no public name
    return local.device if local.device.type in kinds else GroupCommunicator(group).device


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlacement:
    """Experts on the ranks, equally many each; or, of experts that are cut, of their shards.

    Args:
        num_experts: of all ranks.
        rank: this one's index in the group.
        members: the group's ranks in the world, in order.
        group: None for one rank, or for a communicator that is no process group.
        order: expert of each place, of which rank r has the r-th of equal parts; empty for the
            natural order. A hot expert may have several places; see `domain.placement`.
        width: of experts that are cut over consecutive ranks, always in the natural order.
    """

    num_experts: int
    rank: int
    members: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    order: tuple[int, ...] = ()
    width: ExpertWidth = WHOLE
    copies: StateCopies = field(default_factory=StateCopies, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        communicator: Communicator,
        num_experts: int,
        order: tuple[int, ...] = (),
        width: ExpertWidth = WHOLE,
    ) -> "ExpertPlacement":
        """Return the placement of experts over a communicator's ranks."""
        is_natural = order == tuple(range(num_experts)) or communicator.num_ranks == 1
        return cls(
            num_experts=num_experts, rank=communicator.rank, members=communicator.members,
            group=communicator.group if isinstance(communicator, GroupCommunicator) else None,
            order=() if is_natural else order, width=width,
        )  # fmt: skip

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return len(self.members)

    @property
    def num_local(self) -> int:
        """Experts of each rank, replicas and empty places among them."""
        return (len(self.order) or self.num_experts) * self.width.num_shards // self.num_ranks

    @property
    def first(self) -> int:
        """This rank's first place, in the natural order its first expert."""
        return self.rank // self.width.num_shards * self.num_local

    @property
    def experts(self) -> tuple[int, ...]:
        """This rank's experts."""
        order = self.order or range(self.num_experts)
        return tuple(order[self.first : self.first + self.num_local])

    @property
    def counted_rows(self) -> list[int] | None:
        """This rank's places that are the first of their experts; None where all are."""
        if not has_replicas(self.order):
            return None
        firsts = set(places_of(self.order))
        return [row for row in range(self.num_local) if self.first + row in firsts]

    def check_natural(self, what: str) -> None:
        """Raise InputError where a plan has placed the experts.

        Args:
            what: has checkpoints of its own, for the error.
        """
        if self.order:
            raise InputError(
                f"{what} writes checkpoints with the experts in the order of the ranks, and a plan "
                "has placed this layer's otherwise",
                "plan with --expert-placement natural, or use DistributedDataParallel or "
                "moetune.replicate",
            )

    def check_once(self, what: str) -> None:
        """Raise InputError where hot experts have replicas.

        Args:
            what: takes each expert for the only one of its kind, for the error.
        """
        if has_replicas(self.order):
            raise InputError(
                f"{what} have each expert once, and this layer has replicas of hot ones",
                "plan with --expert-placement once, or train with DistributedDataParallel or "
                "moetune.replicate",
            )

    def own(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a parameter of all experts, in the natural order."""
        return self.width.own(name, whole[self.first : self.first + self.num_local])

    def whole(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a parameter of all experts, of all ranks' parts in the natural order."""
        shards = self.width.num_shards
        rows = [parts[first : first + shards] for first in range(0, len(parts), shards)]
        return torch.cat([self.width.whole(name, row) for row in rows])

    def distribute(
        self, local: torch.Tensor, name: str, kind: StateKind = "parameters"
    ) -> torch.Tensor:
        """Return a DTensor of all experts (E, …) in the memory of this rank's.

        Experts in another than the natural order are copies, from an exchange of all ranks.

        Args:
            local: (E / ranks, …), or this rank's shards.
            name: of the parameter in its module.
            kind: of a state dict.

        Raises:
            InputError: the layer's communicator is no process group.
            CollectiveError: the exchange failed.
        """
        from torch.distributed.tensor import DTensor

        if self.order and local.is_meta:
            local = local.new_empty((self.num_experts // self.num_ranks, *local.shape[1:]))
        elif self.order:
            self._check_replicas(local, kind)
            local = self._moved(local, places_of(self.order))
            self.copies.add(kind, local)
        every = DTensor.from_local(
            local, self._mesh(local), self.width.placements(name), run_check=False
        )
        return self.in_pieces(every, name)

    def in_pieces(self, value: "DTensor", name: str) -> "DTensor":
        """Return a DTensor of a parameter as checkpoints need it: see `pieces`."""
        if self.width.num_pieces(name) == 1:
            return value
        from moetune.runtime.moe.pieces import DTensorInPieces

        return DTensorInPieces.of(value)

    def own_part(
        self, value: torch.Tensor, name: str, what: str, kind: StateKind = "parameters"
    ) -> torch.Tensor:
        """Return this rank's experts of a state dict's value.

        Of a DTensor's, experts in another than the natural order come from an exchange of all
        ranks.

        Args:
            value: a DTensor, as `distribute` made it on a rank of this index in a group of this
                size, or a plain tensor of all experts, as in a layer on one rank.
            name: of the parameter in its module.
            what: the value is, for errors.
            kind: of the state dict.

        Raises:
            InputError: it is of one of several ranks, of another one or one that it does not tell.
            CollectiveError: the exchange failed.
        """
        self.copies.forget(kind)
        if is_dtensor(value):
            part = self._own_part_of(value, name, what)
            if not self.order:
                return part
            if part.is_meta:
                return part.new_empty((self.num_local, *part.shape[1:]))
            return self._moved(part, self.order)
        num_found = len(value) if value.dim() else 0
        if num_found == self.num_experts:
            if self.order:
                return value[[max(expert, 0) for expert in self.experts]]
            return self.own(name, value)
        if num_found == self.num_local:
            raise InputError(
                f"{what} has {num_found} of {self.num_experts} experts, and does not tell of which "
                f"of the {self.num_ranks} ranks",
                "load the state dict that the layer gives, or one with all experts",
            )
        return value  # torch names both shapes in its error

    def _own_part_of(self, value: "DTensor", name: str, what: str) -> torch.Tensor:
        mesh, shards = value.device_mesh, self.width.num_shards
        mine = (self.rank,) if shards == 1 else divmod(self.rank, shards)
        # A mesh from a file still has the coordinate of the rank that wrote the file.
        is_own = tuple(mesh.get_coordinate() or ()) == mine and mesh.size() == self.num_ranks
        if is_own and list(value.placements) == self.width.placements(name):
            local: torch.Tensor = value.to_local()
            return local
        raise InputError(
            f"{what} is a DTensor {value.placements} at {mesh.get_coordinate()} of {mesh}, and "
            f"this is rank {self.rank} of {self.num_ranks}",
            "load it with torch.distributed.checkpoint, which moves experts between ranks",
        )

    def _moved(self, local: torch.Tensor, sources: Sequence[int]) -> torch.Tensor:
        """Return this rank's rows of all ranks' `local`, in another order; all ranks call this.

        Args:
            local: (rows, …), of as many rows on each rank.
            sources: of all ranks' rows of the result, the one of `local` that each is, or EMPTY.
        """
        before, after = len(local), len(sources) // self.num_ranks
        rows = [max(source, 0) for source in sources]  # an empty place has some expert's values
        of_rank = [rows[rank * after : (rank + 1) * after] for rank in range(self.num_ranks)]
        first = self.rank * before
        leaving = [[row - first for row in one if first <= row < first + before] for one in of_rank]
        mine = of_rank[self.rank]
        arriving = sorted(range(after), key=lambda row: (mine[row] // before, row))
        froms = [row // before for row in mine]
        given, taken = list(map(len, leaving)), list(map(froms.count, range(self.num_ranks)))
        communicator = GroupCommunicator(self.process_group)
        held = local.detach().to(_sent_from(self.process_group, local))
        picked = held[[row for one in leaving for row in one]]
        sent = picked.reshape(len(picked), -1).view(torch.uint8)  # backends lack some dtypes
        received = sent.new_empty((after, sent.shape[1]))
        communicator.all_to_all(received, sent, taken, given, "the move of experts' states").wait()
        moved = held.new_empty((after, *held.shape[1:]))
        moved[arriving] = received.view(held.dtype).view_as(moved)
        return moved.to(local.device)

    def _check_replicas(self, local: torch.Tensor, kind: StateKind) -> None:
        """Check that replicas are equal, by their sums; all ranks call this.

        Raises:
            InputError: two differ; on all ranks.
            CollectiveError: the exchange failed.
        """
        if not has_replicas(self.order):
            return
        found_replicas = replicas_of(self.order)
        sums = torch.zeros(self.num_local, 2, dtype=torch.float64)
        for row, expert in enumerate(self.experts):
            if expert != EMPTY and len(found_replicas[expert]) > 1:
                values = local[row].detach().double()
                sums[row] = torch.stack((values.sum(), values.abs().sum()))
        sums = sums.to(_sent_from(self.process_group, local))
        communicator = GroupCommunicator(self.process_group)
        found = (
            communicator.all_gather_values(
                sums.view(torch.int64).reshape(-1), "the comparison of replicas of experts"
            )
            .reshape(-1, 2)
            .tolist()
        )
        for expert, places in enumerate(found_replicas):
            if any(found[place] != found[places[0]] for place in places):
                ranks = [place // self.num_local for place in places]
                raise InputError(
                    f"{_WORDS[kind]} {expert} differ between its replicas on ranks {ranks}: "
                    "something has changed one of them alone",
                    "use an optimizer whose steps of an expert depend on it alone, such as AdamW, "
                    "or plan with --expert-placement once",
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
        both = self.width.mesh
        if both is None:
            return DeviceMesh.from_group(group, kind, mesh_dim_names=(EXPERTS,))
        return DeviceMesh.from_group(
            both.get_all_groups(), kind, mesh=both.mesh, mesh_dim_names=(EXPERTS, WIDTH)
        )
