"""Collectives of the ranks with replicas of the same parameters; `stored` chunks use them."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from moetune.comm.gloo import new_communicator
from moetune.comm.group import Communicator, OneRank


class ReplicaGroup:
    """The ranks that share the states of some chunks; all call it in the same order.

    Args:
        members: their ranks in the world, in order; empty without torch.distributed.
    """

    def __init__(self, members: Sequence[int] = ()) -> None:
        self.members = tuple(members)
        self.num_ranks = max(len(members), 1)
        self.rank = self.members.index(dist.get_rank()) if members else 0
        # Not the model's group, whose exchanges would come between these.
        self._communicator: Communicator = OneRank()
        if self.num_ranks > 1:
            self._communicator = new_communicator(self.members, purpose="a model's chunks")

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Callable[[], None]:
        """Start filling `whole` with the ranks' shards; return the function that waits for it."""
        return self._communicator.all_gather(whole, shard, "the gathering of a chunk").wait

    def arrivals(self, whole: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer, not filled, for the reduce-scatter of `whole`.

        Args:
            dtype: of the sum.
        """
        is_one = self._has_reduce_scatter(whole, dtype)
        return whole.new_empty(whole.numel() // self.num_ranks if is_one else whole.numel())

    def reduce_scatter(
        self, whole: torch.Tensor, received: torch.Tensor, dtype: torch.dtype
    ) -> Callable[[], torch.Tensor]:
        """Start a reduce-scatter of `whole`; return the function that waits for this rank's sum.

        Where the backend's own sends as little and its sum has the dtype, it is that. Else it is
        an all-to-all and a local sum: gloo's own is an all-reduce, which sends at least twice as
        much, and a sum of bfloat16 values on the way would be rounded at every rank.

        Args:
            received: what `arrivals` returned.
            dtype: of the sum.
        """
        name = "the reduction of a chunk"
        if self._has_reduce_scatter(whole, dtype):
            reduction = self._communicator.reduce_scatter(received, whole, name)

            def arrived() -> torch.Tensor:
                reduction.wait()
                return received

            return arrived
        # As bytes: backends lack some dtypes that need only be moved.
        transfer = self._communicator.all_to_all(
            received.view(torch.uint8), whole.view(torch.uint8), None, None, name
        )

        def total() -> torch.Tensor:
            transfer.wait()
            return received.view(self.num_ranks, -1).sum(dim=0, dtype=dtype)

        return total

    def _has_reduce_scatter(self, whole: torch.Tensor, dtype: torch.dtype) -> bool:
        return whole.is_cuda and whole.dtype == dtype and whole.is_floating_point()

    def all_reduce(self, whole: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start summing over the ranks in place; return the function that waits for the sum."""
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
