"""Collectives of the ranks with replicas of the same parameters."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from moetune.domain.errors import CollectiveError
from moetune.runtime.links import collective_failed

_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name since torch 2.13, and before."""


class ReplicaGroup:
    """The ranks that share the states of some chunks; all make the same calls in the same order.

    Args:
        members: their ranks in the world, in order; empty without torch.distributed.
    """

    def __init__(self, members: Sequence[int] = ()) -> None:
        self.members = tuple(members)
        self.num_ranks = max(len(members), 1)
        self.rank = self.members.index(dist.get_rank()) if members else 0
        self._group: dist.ProcessGroup | None = None
        if self.num_ranks > 1:
            # A communicator of its own: the model's exchanges cannot come between.
            self._group = dist.new_group(list(members), use_local_synchronization=True)
        self._device = torch.device("cpu")
        if self._group is not None and dist.get_backend(self._group) == "nccl":
            self._device = torch.device("cuda", torch.cuda.current_device())

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Callable[[], None]:
        """Begin to fill `whole` with the ranks' shards; the result waits for it."""
        work = self._begin(
            "the gathering of a chunk",
            lambda: _ALL_GATHER(_raw(whole), _raw(shard), group=self._group, async_op=True),
        )
        return self._waiting("the gathering of a chunk", work, shard)

    def reduce_scatter(
        self, whole: torch.Tensor, received: torch.Tensor
    ) -> Callable[[torch.dtype], torch.Tensor]:
        """Begin a reduce-scatter of `whole`; the result waits and returns this rank's sum.

        It is an all-to-all and a local sum: gloo's own reduce-scatter is an all-reduce and sends
        twice as much, and here the sum can be made in a wider dtype.

        Args:
            received: a buffer as large as `whole`.
        """
        work = self._begin(
            "the reduction of a chunk",
            lambda: dist.all_to_all_single(
                _raw(received), _raw(whole), group=self._group, async_op=True
            ),
        )
        wait = self._waiting("the reduction of a chunk", work, whole)

        def total(dtype: torch.dtype) -> torch.Tensor:
            wait()
            return received.view(self.num_ranks, -1).sum(dim=0, dtype=dtype)

        return total

    def all_reduce(self, whole: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin an in-place sum over the ranks; the result waits and returns it."""
        work = self._begin(
            "the reduction of a chunk",
            lambda: dist.all_reduce(whole, group=self._group, async_op=True),
        )
        wait = self._waiting("the reduction of a chunk", work, whole)

        def total() -> torch.Tensor:
            wait()
            return whole

        return total

    def all_reduce_max(self, values: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum over the ranks."""
        if self.num_ranks > 1:
            values = values.to(self._device)
            work = self._begin(
                "the agreement on a step",
                lambda: dist.all_reduce(values, dist.ReduceOp.MAX, self._group, async_op=True),
            )
            self._waiting("the agreement on a step", work, values)()
        return values

    def all_reduce_sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor on the CPU over the ranks."""
        if self.num_ranks > 1:
            value = value.to(self._device)
            value = self.all_reduce(value)()
        return value.cpu()

    def all_gather_text(self, text: str) -> list[str]:
        """Return all ranks' texts, in the order of the ranks."""
        found = [text] * self.num_ranks
        if self.num_ranks > 1:
            try:
                dist.all_gather_object(found, text, group=self._group)
            except RuntimeError as error:
                raise self._failed("the exchange of texts", error) from error
        return found

    def gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Return all ranks' tensors on the first rank's CPU, in order; nothing on the others."""
        if self.num_ranks == 1:
            return [value]
        value = value.to(self._device).contiguous()
        into = [torch.empty_like(value) for _ in self.members] if self.rank == 0 else None
        try:
            dist.gather(value, into, group=self._group, group_dst=0)
        except RuntimeError as error:
            raise self._failed("the collection of states", error) from error
        return [each.cpu() for each in into or []]

    def _begin(self, what: str, issue: Callable[[], dist.Work | None]) -> dist.Work:
        try:
            work = issue()
        except RuntimeError as error:
            raise self._failed(what, error) from error
        assert work is not None  # noqa: S101 - every rank that calls is a member
        return work

    def _waiting(self, what: str, work: dist.Work, *kept: torch.Tensor) -> Callable[[], None]:
        """Return the wait for `work`, which keeps tensors alive until then."""

        def wait(_: tuple[torch.Tensor, ...] = kept) -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise self._failed(what, error) from error

        return wait

    def _failed(self, what: str, error: Exception) -> CollectiveError:
        return collective_failed(what, f"rank {self.rank} of {self.num_ranks}", error)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as bytes: backends lack some dtypes that need only be moved."""
    return tensor.view(torch.uint8)
