"""`MirrorWorld`: torch.distributed for one rank, whose peers do exactly what it does.

Collectives run in the process group's own lanes, as NCCL's do: behind the current stream at the
time of issue, and waited for by whatever stream is current when `wait` is called. Those of tensors
on the host run as gloo's do, until the host waits. Peers have this rank's data: what a rank gets
from another is what it would itself send to its own place, repeated or cut to the size that it
expects. So values are plausible, and only real ranks can tell whether they are right.

A run of each rank gives one log of collectives each, which `orders.check_orders` compares.
"""

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, Self

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch._C._distributed_c10d import _unregister_process_group as unregister
from torch.distributed import distributed_c10d as c10d

from tests.cuda_kit.device import FakeCuda
from tests.cuda_kit.group import Issued, MirrorGroup

SECONDS = 4e-3
"""Simulated time of a collective."""


class NcclGroup:
    """What builds of torch with NCCL have."""

    class Options:
        """Options of a group."""

        def __init__(self, is_high_priority_stream: bool = False) -> None:  # noqa: FBT001, FBT002 - torch's signature
            self.is_high_priority_stream = is_high_priority_stream
            self._timeout = dt.timedelta(minutes=10)


class MirrorWorld:
    """Within this context torch.distributed is initialised, and every peer mirrors this rank.

    Args:
        backends: by device type, as in `init_process_group("cpu:gloo,cuda:nccl")`.
        seconds: simulated time of a collective.
        says: what a rank says in an exchange of objects, given what this one says, this rank and
            that one; default, the same.

    Attributes:
        log: what this rank issued, for `check_orders`.
    """

    def __init__(
        self,
        cuda: FakeCuda,
        *,
        rank: int = 0,
        num_ranks: int = 2,
        backends: Mapping[str, str] = MappingProxyType({"cpu": "gloo", "cuda": "nccl"}),
        seconds: float = SECONDS,
        says: Callable[[Any, int, int], Any] | None = None,
    ) -> None:
        self.cuda, self.rank, self.num_ranks = cuda, rank, num_ranks
        self.backends, self.seconds, self.says = backends, seconds, says
        self.log: list[Issued] = []
        self.groups: list[MirrorGroup] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        assert not dist.is_initialized()
        monkeypatch = self._stack.enter_context(pytest.MonkeyPatch.context())
        monkeypatch.setattr(c10d, "_world", c10d._World())
        for module in (dist, c10d):
            monkeypatch.setattr(module, "new_group", self._new_group)
        # Builds of torch for the CPU lack it.
        monkeypatch.setattr(dist, "ProcessGroupNCCL", NcclGroup, raising=False)
        monkeypatch.setattr(dist, "all_gather_object", self._gathered(dist.all_gather_object))
        c10d._update_default_pg(self._make(range(self.num_ranks), "the world"))
        return self

    def __exit__(self, *error: object) -> None:
        for group in self.groups:
            unregister(group.name)
        c10d._update_default_pg(None)
        self._stack.close()

    def _new_group(
        self,
        ranks: Sequence[int] | None = None,
        *_: object,
        group_desc: str | None = None,
        pg_options: object = None,
        **__: object,
    ) -> Any:
        members = range(self.num_ranks) if ranks is None else sorted(ranks)
        if self.rank not in members:
            return dist.GroupMember.NON_GROUP_MEMBER
        group = self._make(members, group_desc or "undefined")
        group.options = pg_options
        return group

    def _make(self, members: Sequence[int], desc: str) -> MirrorGroup:
        number = sum(group.members == tuple(members) for group in self.groups)
        name: Any = f"group {len(self.groups)} of ranks {', '.join(map(str, members))}"
        group = MirrorGroup(self, members, name, number, desc)
        self.groups.append(group)
        config = ",".join(f"{kind}:{backend}" for kind, backend in self.backends.items())
        backends = list(self.backends.values())
        c10d._register_pg_in_world(
            group, backends[0] if len(backends) == 1 else config, HashStore(), name, config,
            {rank: place for place, rank in enumerate(members)},
        )  # fmt: skip
        return group

    def _gathered(self, original: Callable[..., None]) -> Callable[..., None]:
        def all_gather_object(gathered: list[Any], value: object, group: Any = None) -> None:
            original(gathered, value, group=group)
            if self.says is not None:
                members = self.groups[0].members if group is None else group.members
                gathered[:] = [self.says(value, self.rank, rank) for rank in members]

        return all_gather_object
