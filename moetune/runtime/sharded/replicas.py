"""Collectives of the ranks with replicas of the same parameters."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from moetune.comm.gloo import new_communicator
from moetune.comm.group import Communicator, OneRank


class ReplicaGroup:
    """The ranks that share the states of some chunks; all make the same calls in the same order.

    Args:
        members: their ranks in the world, in order; empty without torch.distributed.
    """

    def __init__(self, members: Sequence[int] = ()) -> None:
        self.members = tuple(members)
        self.num_ranks = max(len(members), 1)
        self.rank = self.members.index(dist.get_rank()) if members else 0
        # A communicator of its own: the model's exchanges cannot come between.
        self._communicator: Communicator = OneRank()
        if self.num_ranks > 1:
            self._communicator = new_communicator(self.members)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Callable[[], None]:
        """Begin to fill `whole` with the ranks' shards; the result waits for it."""
        return self._communicator.all_gather(whole, shard, "the gathering of a chunk").wait

    def reduce_scatter(
        self, whole: torch.Tensor, received: torch.Tensor
    ) -> Callable[[torch.dtype], torch.Tensor]:
        """Begin a reduce-scatter of `whole`; the result waits and returns this rank's sum.

        It is an all-to-all and a local sum: gloo's own reduce-scatter is an all-reduce and sends
        twice as much, and here the sum can be made in a wider dtype.

        Args:
            received: a buffer as large as `whole`.
        """
        # As bytes: backends lack some dtypes that need only be moved.
        transfer = self._communicator.all_to_all(
            received.view(torch.uint8), whole.view(torch.uint8), None, None,
            "the reduction of a chunk",
        )  # fmt: skip

        def total(dtype: torch.dtype) -> torch.Tensor:
            transfer.wait()
            return received.view(self.num_ranks, -1).sum(dim=0, dtype=dtype)

        return total

    def all_reduce(self, whole: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin an in-place sum over the ranks; the result waits and returns it."""
        transfer = self._communicator.all_reduce(whole, "the reduction of a chunk")

        def total() -> torch.Tensor:
            transfer.wait()
            return whole

        return total

    def all_reduce_max(self, values: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum over the ranks."""
        return self._communicator.all_reduce_values(values, "the agreement on a step", op="max")

    def all_reduce_sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, on the CPU."""
        return self._communicator.all_reduce_values(value, "the reduction of a chunk").cpu()

    def all_gather_text(self, text: str) -> list[str]:
        """Return all ranks' texts, in the order of the ranks."""
        return self._communicator.all_gather_object(text, "the exchange of texts")

    def gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Return all ranks' tensors on the first rank's CPU, in order; nothing on the others."""
        return self._communicator.gather(value, "the collection of states")
