"""Collectives of the ranks with replicas of the same parameters; `stored` chunks use them."""

from collections.abc import Callable, Sequence

import torch

from moetune.comm.gloo import new_communicator
from moetune.comm.group import Communicator, OneRank
from moetune.comm.transfer import Transfer

REDUCTION = "the reduction of a chunk"


def replica_group(members: Sequence[int]) -> Communicator:
    """Return the communicator of ranks that share the states of some chunks.

    It is not the model's, whose exchanges would come between theirs.

    Args:
        members: their ranks in the world, in order.
    """
    if len(members) < 2:  # noqa: PLR2004 - one rank, or none without torch.distributed
        return OneRank()
    return new_communicator(tuple(members), purpose="a model's chunks")


def start_reduce_scatter(
    replicas: Communicator, whole: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """Start a reduce-scatter of `whole`; return its buffer, and what waits for this rank's sum.

    Where the backend's own sends as little and its sum has the dtype, it is that. Else it is
    an all-to-all and a local sum: gloo's own is an all-reduce, which sends at least twice as
    much, and a sum of bfloat16 values on the way would be rounded at every rank.

    Args:
        dtype: of the sum.
    """
    if whole.is_cuda and whole.dtype == dtype and whole.is_floating_point():
        received = whole.new_empty(whole.numel() // replicas.num_ranks)
        return received, _waited(replicas.reduce_scatter(received, whole, REDUCTION), received)
    received = torch.empty_like(whole)
    # As bytes: backends lack some dtypes that need only be moved.
    arrived = _waited(
        replicas.all_to_all(
            received.view(torch.uint8), whole.view(torch.uint8), None, None, REDUCTION
        ),
        received,
    )
    return received, lambda: arrived().view(replicas.num_ranks, -1).sum(dim=0, dtype=dtype)


def start_all_reduce(replicas: Communicator, whole: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start summing over the ranks in place; return the function that waits for the sum."""
    return _waited(replicas.all_reduce(whole, REDUCTION), whole)


def _waited(transfer: Transfer, values: torch.Tensor) -> Callable[[], torch.Tensor]:
    def wait() -> torch.Tensor:
        transfer.wait()
        return values

    return wait
