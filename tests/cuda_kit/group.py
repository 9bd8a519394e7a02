"""One communicator of the mirror world: its collectives, their lanes, and what was issued."""

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from tests.cuda_kit.device import FakeCuda
from tests.cuda_kit.lanes import Lane, Point
from tests.cuda_kit.tensors import HOST


class World(Protocol):
    """What a communicator needs to know of the world: see `MirrorWorld`."""

    cuda: FakeCuda
    rank: int
    backends: Mapping[str, str]
    seconds: float
    log: "list[Issued]"


@dataclass(slots=True, kw_only=True, eq=False)
class Issued:
    """One collective of a rank, in the order of issue.

    Args:
        group: members of the communicator and its number among those with the same members.
        kind: name of the collective, with its dtype.
        is_on_device: it runs on a GPU, where later ones wait for it.
        waited_at: how many had been issued when the host waited for it; None if it never did.
    """

    group: tuple[tuple[int, ...], int]
    kind: str
    is_on_device: bool
    waited_at: int | None = None


class MirrorFuture:
    """The future of a work: with NCCL it is done as soon as the work is issued."""

    def __init__(self, work: "MirrorWork") -> None:
        self._work = work

    def done(self) -> bool:
        """Return whether the work was issued."""
        return True

    def wait(self) -> None:
        """Order the current stream behind the work, and keep its tensors."""
        self._work.order()

    def add_done_callback(self, callback: Callable[["MirrorFuture"], None]) -> None:
        """Call at once."""
        callback(self)


class MirrorWork:
    """A collective under way, whose tensors its group holds until it is waited for."""

    def __init__(self, group: "MirrorGroup", entry: Issued, lane: Lane) -> None:
        self._group, self._entry = group, entry
        self._point: Point = lane.point()
        self._device = lane.device

    def wait(self, timeout: dt.timedelta | None = None) -> bool:  # noqa: ARG002 - torch's signature
        """Order the current stream of the tensors' device, or the host, behind the end."""
        self.order()
        self._group.stash.pop(self._entry, None)
        return True

    def order(self) -> None:
        """Do so, and keep the tensors."""
        world = self._group.world
        if self._device != HOST:
            world.cuda.streams.lane(self._device).follow(self._point)
            return
        world.cuda.host.follow(self._point)
        if self._entry.waited_at is None:
            self._entry.waited_at = len(world.log)

    def is_completed(self) -> bool:
        """Return whether it was issued."""
        return True

    def get_future(self) -> MirrorFuture:
        """Return the work's future."""
        return MirrorFuture(self)


_ProcessGroup: Any = dist.ProcessGroup  # whose stubs have an overload for each kind of caller


class MirrorGroup(_ProcessGroup):  # type: ignore[misc] # a base of type Any
    """One communicator of the mirror world."""

    def __init__(
        self, world: World, members: Sequence[int], name: str, number: int, desc: str
    ) -> None:
        self.members = tuple(members)
        self.place = self.members.index(world.rank)
        super().__init__(self.place, len(self.members))
        self.world, self.key = world, (self.members, number)
        self.name: Any = name  # torch's stubs have a type of their own for it
        self.desc = desc
        self.options: object = None
        self.stash: dict[Issued, list[torch.Tensor]] = {}
        self._lanes: dict[torch.device, Lane] = {}

    # What torch asks a group

    def size(self) -> int:
        return len(self.members)

    def rank(self) -> int:
        return self.place

    @property
    def group_name(self) -> Any:
        return self.name

    @property
    def group_desc(self) -> str:
        return self.desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self.world.backends]

    def shutdown(self) -> None:
        """Do nothing."""

    # Collectives, by torch's names

    def all_to_all_single(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        _: object = None,
    ) -> MirrorWork:
        equal = [len(rows) // self.size()] * self.size()
        mine = rows.split(list(input_splits) or equal)[self.place]

        def compute() -> None:
            sizes = list(output_splits) or [len(output) // self.size()] * self.size()
            for part in output.split(sizes):
                if len(mine):
                    part.copy_(mine[torch.arange(len(part)) % len(mine)])
                else:
                    part.zero_()

        return self._issue("all_to_all", [rows], [output], compute)

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> MirrorWork:
        (values,) = tensors
        is_sum = options is None or options.reduceOp == dist.ReduceOp.SUM
        times = self.size() if is_sum else 1
        return self._issue("all_reduce", [], [values], lambda: values.mul_(times))

    def all_gather_single(
        self, output: torch.Tensor, values: torch.Tensor, _: object = None
    ) -> MirrorWork:
        return self._issue(
            "all_gather", [values], [output],
            lambda: output.view(self.size(), -1).copy_(values.clone().reshape(1, -1)),
        )  # fmt: skip

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], _: object = None
    ) -> MirrorWork:
        def compute() -> None:
            for output in outputs[0]:
                output.copy_(inputs[0])

        return self._issue("all_gather", inputs, outputs[0], compute)

    def reduce_scatter_single(
        self, output: torch.Tensor, values: torch.Tensor, _: object = None
    ) -> MirrorWork:
        mine = values.view(self.size(), -1)[self.place]
        return self._issue(
            "reduce_scatter", [values], [output],
            lambda: output.view(-1).copy_(mine.clone()).mul_(self.size()),
        )  # fmt: skip

    def broadcast(self, tensors: list[torch.Tensor], _: object = None) -> MirrorWork:
        return self._issue("broadcast", [], tensors, lambda: None)

    def barrier(self, opts: object = None) -> MirrorWork:  # noqa: ARG002 - torch's signature
        kind = next(iter(self.world.backends))
        device = self.world.cuda.streams.resolve(None) if kind == "cuda" else HOST
        work = self._issue("barrier", [], [], lambda: None, device=device)
        if device != HOST:  # NCCL's barrier blocks the host
            self.world.cuda.host.follow(self._lane(device).point())
        return work

    alltoall_base, _allgather_base, _reduce_scatter_base = (
        all_to_all_single, all_gather_single, reduce_scatter_single,
    )  # fmt: skip
    """Names in earlier versions of torch."""

    def _issue(
        self,
        kind: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        compute: Callable[[], object],
        *,
        device: torch.device | None = None,
    ) -> MirrorWork:
        world, cuda = self.world, self.world.cuda
        tensors = [*reads, *writes]
        device = cuda.tensors.device_of(tensors[0]) if device is None else device
        if device.type not in world.backends:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        dtype = f" {tensors[0].dtype}" if tensors else ""
        entry = Issued(group=self.key, kind=f"{kind}{dtype}", is_on_device=device != HOST)
        world.log.append(entry)
        lane = self._lane(device)
        if device != HOST:
            lane.follow(cuda.streams.lane(device).point())
        with torch.no_grad(), _disable_current_modes():
            compute()
        cuda.tensors.collect()
        region = cuda.tensors.region
        cuda.ledger.run(
            lane, cuda.host, f"{kind} of {self.name}", reads=map(region, reads),
            writes=map(region, writes), seconds=world.seconds,
        )  # fmt: skip
        self.stash[entry] = tensors
        return MirrorWork(self, entry, lane)

    def _lane(self, device: torch.device) -> Lane:
        """Return where a collective runs."""
        if device == HOST:
            return Lane(f"a thread of gloo for {self.name}", HOST)
        if device not in self._lanes:
            self._lanes[device] = Lane(f"NCCL's stream of {self.name} on {device}", device)
        return self._lanes[device]
