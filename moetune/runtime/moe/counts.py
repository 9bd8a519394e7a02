"""Numbers of rows: counted on the device, exchanged with the ranks' agreement, and read once.

Between `gate` and `cells` in a layer's forward pass. This read is the pass's only stop: the host
needs the numbers for the sizes of exchanges and products.

P ranks, C pieces, L local experts of a rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from moetune.comm.agree import OPENING_VALUES, Opening, few_values
from moetune.comm.group import Communicator

_MOST_PIECES = 32
"""Pieces that fit into an opening's exchange, whose size must not depend on the degrees."""
_DEGREES = 2
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """Rows of one step.

    Args:
        send_CP, receive_CP: [piece][rank] rows.
        rows_CL: [piece][local expert] rows that this rank receives.
        receive_PCL: the same by source rank, (P, C, L) on the device.
    """

    send_CP: Sequence[Sequence[int]]
    receive_CP: Sequence[Sequence[int]]
    rows_CL: Sequence[Sequence[int]]
    receive_PCL: torch.Tensor


def exchange_counts(send_CPL: torch.Tensor, communicator: Communicator) -> RowCounts:
    """Exchange the ranks' counts, and read them.

    Args:
        send_CPL: rows that this rank sends.

    Raises:
        CollectiveError: the exchange failed.
    """
    if communicator.num_ranks == 1:
        return local_counts(send_CPL, send_CPL[:, 0].tolist())
    send_PCL = send_CPL.transpose(0, 1).contiguous()
    receive_PCL = communicator.all_to_all_blocks(send_PCL, "the exchange of token counts")
    values = torch.cat(_sums(send_PCL, receive_PCL)).tolist()
    return _read(values, receive_PCL)


def local_counts(counts_C1L: torch.Tensor, rows_CL: Sequence[Sequence[int]]) -> RowCounts:
    """Return the counts of rows that stay on this rank.

    Args:
        rows_CL: the same numbers, read by the host.
    """
    sums = [[sum(rows)] for rows in rows_CL]
    return RowCounts(
        send_CP=sums, receive_CP=sums, rows_CL=rows_CL, receive_PCL=counts_C1L.transpose(0, 1)
    )


def open_with_counts(
    opening: Opening,
    send_CPL: torch.Tensor,
    degrees: tuple[int, int],
    communicator: Communicator,
) -> tuple[list[list[int]], RowCounts | None]:
    """Exchange openings and counts at once, and read both.

    The counts are of chunks that a rank expects, before the ranks' agreement says which they are:
    they are of use if all ranks, and then the agreement, have the same.

    Args:
        send_CPL: rows that this rank sends.
        degrees: forward and backward, of the counts.

    Returns:
        Every rank's opening, and the counts; None where the ranks' degrees differ, or have too many
        pieces.

    Raises:
        CollectiveError: the exchange failed.
    """
    num_pieces, num_ranks, num_local = send_CPL.shape
    is_small = num_pieces <= _MOST_PIECES
    mine = (*opening.values, *(degrees if is_small else (0, 0)))
    used = num_pieces * num_local if is_small else 0
    send = _packed(mine, send_CPL, used)
    received = communicator.all_to_all_blocks(send, "the agreement on tokens and their counts")
    heads = received[:, : len(mine)]
    send_PCL, receive_PCL = (
        each[:, len(mine) : len(mine) + used].unflatten(1, (num_pieces, num_local))
        if used else each.new_empty((num_ranks, 0, num_local))
        for each in (send, received)
    )  # fmt: skip
    sums = _sums(send_PCL, receive_PCL)
    values = torch.cat((heads.reshape(-1), *sums)).tolist()
    rows = [values[low : low + len(mine)] for low in range(0, heads.numel(), len(mine))]
    is_common = used and all(tuple(row[-_DEGREES:]) == degrees for row in rows)
    counts = _read(values[heads.numel() :], receive_PCL) if is_common else None
    return [row[:OPENING_VALUES] for row in rows], counts


def open_with_local_counts(
    opening: Opening,
    counts_C1L: torch.Tensor | None,
    communicator: Communicator,
    device: torch.device,
) -> tuple[list[list[int]], RowCounts | None]:
    """Exchange openings, and read them with counts that this rank needs alone.

    Args:
        counts_C1L: None where the rank's input has a problem, so that it has none.
        device: of the input.

    Returns:
        Every rank's opening, and the counts.

    Raises:
        CollectiveError: the exchange failed.
    """
    mine = few_values(opening.values, device)
    heads = communicator.all_gather_values(mine, "the agreement on tokens")
    if counts_C1L is None:
        return heads.tolist(), None
    values = torch.cat((heads.reshape(-1), counts_C1L.reshape(-1))).tolist()
    rows_CL = _rows_of(values[heads.numel() :], counts_C1L.shape[2])
    rows = _rows_of(values[: heads.numel()], OPENING_VALUES)
    return [list(row) for row in rows], local_counts(counts_C1L, rows_CL)


def _packed(mine: Sequence[int], send_CPL: torch.Tensor, used: int) -> torch.Tensor:
    """Return what goes to each rank: an opening, counts, and zeros up to the most there can be."""
    num_pieces, num_ranks, num_local = send_CPL.shape
    send = send_CPL.new_zeros((num_ranks, len(mine) + _MOST_PIECES * num_local))
    send[:, : len(mine)] = few_values(mine, send.device)
    if used:
        into = send[:, len(mine) : len(mine) + used].view(num_ranks, num_pieces, num_local)
        into.copy_(send_CPL.transpose(0, 1))
    return send


def _sums(send_PCL: torch.Tensor, receive_PCL: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        send_PCL.sum(2).T.reshape(-1), receive_PCL.sum(2).T.reshape(-1),
        receive_PCL.sum(0).reshape(-1),
    )  # fmt: skip


def _read(values: Sequence[int], receive_PCL: torch.Tensor) -> RowCounts:
    num_ranks, num_pieces, num_local = receive_PCL.shape
    num_sums = num_pieces * num_ranks
    ends = num_sums, 2 * num_sums, 2 * num_sums + num_pieces * num_local
    return RowCounts(
        send_CP=_rows_of(values[: ends[0]], num_ranks),
        receive_CP=_rows_of(values[ends[0] : ends[1]], num_ranks),
        rows_CL=_rows_of(values[ends[1] : ends[2]], num_local),
        receive_PCL=receive_PCL,
    )  # fmt: skip


def _rows_of(values: Sequence[_T], width: int) -> list[Sequence[_T]]:
    return [values[low : low + width] for low in range(0, len(values), width)]
