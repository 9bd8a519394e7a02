"""The `Communicator`: collectives of a group of ranks, asynchronous and in the order of issue.

Layers, sharded models and measurements communicate only through it. `OneRank` needs no
torch.distributed. `process_group.GroupCommunicator` wraps a torch.distributed group and overrides
every collective. `gloo.communicator_of` chooses between them.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, Protocol, TypeVar

import torch

T = TypeVar("T")
ReduceOp = Literal["sum", "max"]
Wait = Callable[[], None]
"""Makes the current stream, or the host on a CPU, wait for a transfer."""
_MAX_SUMS = 8
"""The number of sums under way at once."""


class Transfer(Protocol):
    """A collective under way; its tensors live until it is waited for."""

    def wait(self) -> None:
        """Order the current stream (on a CPU: the caller) after the end of the collective.

        Raises:
            CollectiveError: the collective failed; never on a GPU, where only torch's watchdog sees
                the failure.
        """
        ...

    def future(self) -> torch.futures.Future[object] | None:
        """Return a future that completes with the collective; None if it is already complete."""
        ...


class Done:
    """A transfer that was complete when it was issued."""

    def wait(self) -> None:
        """Return at once."""

    def future(self) -> None:
        """Return None: it is complete."""


class Communicator:
    """Collectives among the ranks of a group; this base class has those of a group of one rank.

    Every rank issues the same collectives in the same order, even collectives of zero rows. A rank
    that skipped a collective would leave the others waiting. Methods that return a `Transfer` have
    issued it, and the caller waits for it; the others block. `name` is the collective's name in
    errors and profiles. All methods and waits raise CollectiveError if the collective fails. With
    NCCL they do so only if it cannot be issued, because a wait only orders streams. If NCCL fails
    later, torch's watchdog ends the process, and its message names the group.

    Attributes:
        rank: this rank's index in the group.
        members: the group's ranks in the world, in order.
    """

    rank: int
    members: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        """A device that the group's backend supports, for values from any device."""
        return torch.device("cpu")

    @property
    def num_ranks(self) -> int:
        """The number of ranks in the group."""
        return len(self.members)

    def all_to_all(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        output_splits: Sequence[int] | None,  # noqa: ARG002 - of several ranks
        input_splits: Sequence[int] | None,  # noqa: ARG002
        name: str,  # noqa: ARG002
    ) -> Transfer:
        """Start one all-to-all of rows.

        Args:
            output: (sum of output_splits, …), filled in the order of the source ranks.
            rows: (sum of input_splits, …), contiguous, in the order of the target ranks.
            output_splits: number of rows from each rank; None for equal parts.
            input_splits: number of rows to each rank; None for equal parts.
        """
        output.copy_(rows)
        return Done()

    def all_reduce(self, values: torch.Tensor, name: str, *, op: ReduceOp = "sum") -> Transfer:  # noqa: ARG002
        """Start reducing every rank's contiguous `values`, in place."""
        return Done()

    def all_gather(self, output: torch.Tensor, values: torch.Tensor, name: str) -> Transfer:  # noqa: ARG002
        """Start gathering all ranks' equally large `values` into the contiguous `output`."""
        output.view(-1).copy_(values.reshape(-1))
        return Done()

    def reduce_scatter(self, total: torch.Tensor, shards: torch.Tensor, name: str) -> Transfer:
        """Start summing contiguous, equal `shards` over ranks; rank r gets the sum of shard r."""
        total.copy_(shards)
        return self.all_reduce(total, name)  # as a subclass that models a wire does

    def broadcast(self, values: torch.Tensor, name: str) -> Transfer:  # noqa: ARG002
        """Start replacing every rank's contiguous `values` with those of rank 0."""
        return Done()

    def send_receive(
        self, to: Mapping[int, torch.Tensor], source: Mapping[int, torch.Tensor], name: str
    ) -> Transfer:
        """Start sends and receives in one batch.

        Args:
            to: tensors to send, by their receiver's rank in the group.
            source: tensors to fill, by their sender's rank in the group.

        Raises:
            ValueError: there are tensors, but no other rank.
        """
        if to or source:
            raise ValueError(f"{name}: one rank has no other to send to or receive from")
        return Done()

    def all_gather_object(self, value: T, name: str) -> list[T]:  # noqa: ARG002
        """Return every rank's picklable value, in the order of the ranks."""
        return [value]

    def broadcast_object(self, value: T, name: str) -> T:  # noqa: ARG002
        """Return the picklable value of rank 0 on every rank."""
        return value

    def barrier(self, name: str) -> None:
        """Wait for every rank."""

    def all_to_all_blocks(self, blocks: torch.Tensor, name: str) -> torch.Tensor:
        """Return block r of every rank's `blocks` (num_ranks, …) on rank r; blocking."""
        if self.num_ranks == 1:
            return blocks
        received = torch.empty_like(blocks)
        self.all_to_all(received, blocks, None, None, name).wait()
        return received

    def all_gather_values(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Return every rank's equally large `values` (…) as (num_ranks, …); blocking."""
        if self.num_ranks == 1:
            return values.unsqueeze(0)
        gathered = values.new_empty((self.num_ranks, *values.shape))
        self.all_gather(gathered, values, name).wait()
        return gathered

    def sum_in_place(self, tensors: Iterable[torch.Tensor], name: str, *, divisor: int = 1) -> None:
        """Replace tensors with their sums over the ranks, divided by a number; blocking.

        Sums are in float32 at least: a sum in bfloat16 would be rounded at every rank. Only a few
        narrow tensors have wide copies at the same time.
        """
        pending: deque[Callable[[], None]] = deque()
        for values in tensors if self.num_ranks > 1 else ():
            if len(pending) == _MAX_SUMS:
                pending.popleft()()
            total = values.to(torch.promote_types(values.dtype, torch.float32))
            transfer = self.all_reduce(total, name)
            pending.append(partial(_finish_sum, values, total, transfer, divisor))
        for finish in pending:
            finish()

    def all_reduce_values(
        self, values: torch.Tensor, name: str, *, op: ReduceOp = "sum"
    ) -> torch.Tensor:
        """Return the reduction of a few values over the ranks, on the CPU; blocking."""
        if self.num_ranks == 1:
            return values
        reduced = values.to(self.device, copy=True)
        self.all_reduce(reduced, name, op=op).wait()
        return reduced.cpu()


class OneRank(Communicator):
    """A group of one rank, which needs no torch.distributed."""

    rank = 0
    members: tuple[int, ...] = (0,)


def _finish_sum(
    values: torch.Tensor, total: torch.Tensor, transfer: Transfer, divisor: int
) -> None:
    transfer.wait()
    if divisor > 1:
        total.div_(divisor)
    values.copy_(total)
