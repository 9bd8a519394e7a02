"""The ranks that measure together: one pulse, one decision for all."""

import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from moetune.domain.cluster import Group, members
from moetune.domain.errors import CollectiveError

T = TypeVar("T")


class Ranks:
    """This process's place among the ranks, and what they must agree on.

    Agreement travels over gloo groups of its own, beside the collectives that are measured:
    one for the main thread, one for a thread that keeps a collective going meanwhile.
    Without torch.distributed this is the only rank.

    Args:
        timeout_seconds: how long a rank waits for the others before it gives up.
    """

    def __init__(self, *, timeout_seconds: float = 120.0) -> None:
        self._timeout = dt.timedelta(seconds=timeout_seconds)
        self.rank, self.world_size = 0, 1
        self._control: dist.ProcessGroup | None = None
        self._votes: dist.ProcessGroup | None = None
        self._groups: dict[Group, dist.ProcessGroup | None] = {}
        if not dist.is_initialized():
            return
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._control = self._agreement_group()
        self._votes = self._agreement_group()

    def _agreement_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=self._timeout)
        return group

    def open_groups(self, groups: Iterable[Group], *, ranks_per_node: int) -> None:
        """Form groups of each kind, on all ranks together.

        All groups of one kind work at the same time, as they do in training.
        """
        alone = {(1, 0)}
        for group in sorted(set(groups) - self._groups.keys() - alone):
            self._groups[group] = self._new_group(group, ranks_per_node)

    def _new_group(self, group: Group, ranks_per_node: int) -> dist.ProcessGroup | None:
        mine: dist.ProcessGroup | None = None
        for ranks in members(group, num_ranks=self.world_size, ranks_per_node=ranks_per_node):
            made = dist.new_group(list(ranks), timeout=self._timeout)
            mine = made if self.rank in ranks else mine
        return mine

    def group(self, group: Group) -> dist.ProcessGroup | None:
        """Return this rank's group of that kind; None where the ranks leave it over."""
        return self._groups[group]

    def barrier(self) -> None:
        """Wait for every rank."""
        if self._control is not None:
            with self._named():
                dist.barrier(group=self._control)

    def maximum(self, values: Sequence[float]) -> tuple[float, ...]:
        """Return the largest of every rank's value at each place."""
        if self._control is None:
            return tuple(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        with self._named():
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._control)
        return tuple(tensor.tolist())

    def first_text(self, text: str) -> str:
        """Return the first rank's text that is not empty."""
        return next(filter(None, self.of_all(text)), "")

    def of_all(self, value: T) -> tuple[T, ...]:
        """Return every rank's value, by rank."""
        if self._control is None:
            return (value,)
        values = [value] * self.world_size
        with self._named():
            dist.all_gather_object(values, value, group=self._control)
        return tuple(values)

    def from_first(self, value: T) -> T:
        """Return the value of rank 0; the other ranks' is ignored."""
        if self._control is None:
            return value
        box = [value]
        with self._named():
            dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def vote(self, stop: bool) -> Callable[[], bool]:  # noqa: FBT001 - a vote is its one value
        """Start a vote and return the function that waits for it: any rank's wish wins.

        For the one thread beside the main one.
        """
        if self._votes is None:
            return lambda: stop
        wish = torch.tensor([stop], dtype=torch.int32)
        work = dist.all_reduce(wish, dist.ReduceOp.MAX, group=self._votes, async_op=True)

        def outcome() -> bool:
            with self._named():
                work.wait()
            return bool(wish.item())

        return outcome

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank} of {self.world_size} lost the others while they agreed on a "
                f"measurement: {str(error).splitlines()[0]}",
                "a rank died or hangs: see its own output, then run again with --resume",
            ) from error
