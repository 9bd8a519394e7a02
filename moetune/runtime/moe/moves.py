"""Moves of experts' states between the ranks of a layer, whose order a plan has changed."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from moetune.comm.process_group import GroupCommunicator


def moved(local: torch.Tensor, sources: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's rows of all ranks' `local`, in another order; all ranks call this.

    Args:
        local: (rows, …), of as many rows on each rank.
        sources: of all ranks' rows of the result, the one of `local` that each is.

    Raises:
        CollectiveError: the exchange failed.
    """
    communicator = GroupCommunicator(group)
    num_ranks, rank = communicator.num_ranks, communicator.rank
    before, after = len(local), len(sources) // num_ranks
    of_rank = [sources[one * after : (one + 1) * after] for one in range(num_ranks)]
    first = rank * before
    leaving = [[row - first for row in one if first <= row < first + before] for one in of_rank]
    mine = of_rank[rank]
    arriving = sorted(range(after), key=lambda row: (mine[row] // before, row))
    froms = [row // before for row in mine]
    given, taken = list(map(len, leaving)), list(map(froms.count, range(num_ranks)))
    held = local.detach().to(_sent_from(group, local))
    picked = held[[row for one in leaving for row in one]]
    sent = picked.reshape(len(picked), held[0].numel()).view(torch.uint8)  # backends lack dtypes
    received = sent.new_empty((after, sent.shape[1]))
    communicator.all_to_all(received, sent, taken, given, "the move of experts' states").wait()
    found = held.new_empty((after, *held.shape[1:]))
    found[arriving] = received.view(held.dtype).view_as(found)
    return found.to(local.device)


def _sent_from(group: dist.ProcessGroup, local: torch.Tensor) -> torch.device:
    """Return the tensor's device, or one whose values the group's backend can send."""
    kinds = {device.type for device in group._device_types}  # noqa: SLF001 - torch has no public name
    return local.device if local.device.type in kinds else GroupCommunicator(group).device
