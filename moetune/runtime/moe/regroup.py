"""Reorder received rows: by source rank on the wire, by expert for the GEMMs.

The memory policies `keep` and `reuse` do this before and after a chunk's computation, each time by
one index that was made on the device.

P ranks, C pieces, L local experts, N rows this rank sends, R rows it receives, K choices a token.
"""

import itertools
from collections.abc import Sequence

import torch

from moetune.comm.group import Communicator
from moetune.runtime.moe.dispatch import Dispatch
from moetune.runtime.moe.pairs import pick


def by_expert(dispatch: Dispatch, chunk_pieces: Sequence[int]) -> torch.Tensor | None:
    """Return for each row by (piece, expert, source) its place by (source, piece, expert).

    `rows.index_select(0, places)` sorts by expert, and `index_copy_` with the same places sorts
    back. Places count from the beginning of the row's chunk.

    Args:
        chunk_pieces: bounds of the chunks, in pieces.

    Returns:
        (R,); None where both orders are the same: with one source rank, or with one expert and
        piece in every chunk.
    """
    counts_PCL = dispatch.counts.receive_PCL
    num_ranks, num_pieces, num_local = counts_PCL.shape
    is_piece_each = len(chunk_pieces) - 1 == num_pieces
    if num_ranks == 1 or (num_local == 1 and is_piece_each):
        return None
    if is_piece_each:
        starts_CPL = _before(counts_PCL.transpose(0, 1).flatten(1))
        starts_CLP = starts_CPL.view(num_pieces, num_ranks, num_local).transpose(1, 2)
    else:
        starts_CLP = torch.cat([
            _before(counts_PCL[:, low:high].reshape(-1))
            .view(num_ranks, high - low, num_local).permute(1, 2, 0)
            for low, high in itertools.pairwise(chunk_pieces)
        ])  # fmt: skip
    counts_CLP = counts_PCL.permute(1, 2, 0)
    return _places(starts_CLP, counts_CLP, dispatch.num_received)


def by_expert_in_step(dispatch: Dispatch) -> torch.Tensor | None:
    """Return for each received row by (piece, expert) its place by (expert, piece).

    Returns:
        (R,); None with one piece, where both orders are the same.
    """
    counts_CL = dispatch.counts.receive_PCL.sum(0)
    if len(counts_CL) == 1:
        return None
    starts_CL = _before(counts_CL.T.reshape(-1)).view(counts_CL.T.shape).T
    return _places(starts_CL, counts_CL, dispatch.num_received)


def _places(starts: torch.Tensor, counts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return each row's place in another order.

    Args:
        starts: of the rows of every cell in the other order.
        counts: rows of every cell, in the order of the rows.
        num_rows: their sum.
    """
    flat = counts.reshape(-1)
    shift = starts.reshape(-1) - _before(flat)
    # Without the size the host would wait for the counts.
    places_R = shift.repeat_interleave(flat, output_size=num_rows)
    places_R += torch.arange(num_rows, device=flat.device)
    return places_R


def _before(counts: torch.Tensor) -> torch.Tensor:
    """Return the sum of the counts before each one in its line."""
    return counts.cumsum(-1).sub_(counts)


def transpose_blocks(
    rows: torch.Tensor, counts: Sequence[Sequence[int]], out: torch.Tensor
) -> torch.Tensor:
    """Return the blocks [i][j] of `rows` in the order [j][i]."""
    blocks = iter(torch.split(rows, list(itertools.chain.from_iterable(counts))))
    grid = [[next(blocks) for _ in line] for line in counts]
    flat = [block for column in zip(*grid, strict=True) for block in column]
    return torch.cat(flat, out=out)


class WeightExchange:
    """Sends combine weights to the experts, and brings their gradients back: once a step each.

    `reuse` does not save the results that come back, so its experts apply the weights.
    """

    def __init__(self, dispatch: Dispatch, communicator: Communicator) -> None:
        self._dispatch, self._communicator = dispatch, communicator
        order = dispatch.forward
        self._chunk_counts = order.send_counts
        self._rank_counts = list(zip(*order.send_counts, strict=True))
        self._send = [sum(counts) for counts in self._rank_counts]
        self._receive = [sum(counts) for counts in zip(*order.receive_counts, strict=True)]
        self._places_R = by_expert(dispatch, (0, order.chunk_pieces[-1]))

    def send(self, weights_TK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights of the rows that this rank receives, (R, 1) by piece and expert."""
        rows_N1 = self._dispatch.forward.weights_of_rows(weights_TK).to(dtype).unsqueeze(1)
        rows_N1 = transpose_blocks(rows_N1, self._chunk_counts, torch.empty_like(rows_N1))
        arrived_R1 = rows_N1.new_empty(sum(self._receive), 1)
        name = "the exchange of weights"
        self._communicator.all_to_all(arrived_R1, rows_N1, self._receive, self._send, name).wait()
        if self._places_R is None:
            return arrived_R1
        return arrived_R1.index_select(0, self._places_R)

    def return_grads(self, grads_R1: torch.Tensor, like_TK: torch.Tensor) -> torch.Tensor:
        """Return the gradients of the weights, 0 for dropped pairs, shaped as `like_TK`."""
        if self._places_R is not None:
            grads_R1 = torch.empty_like(grads_R1).index_copy_(0, self._places_R, grads_R1)
        arrived_N1 = grads_R1.new_empty(sum(self._send), 1)
        name = "the exchange of the weights' gradients"
        self._communicator.all_to_all(arrived_N1, grads_R1, self._send, self._receive, name).wait()
        rows_N1 = transpose_blocks(arrived_N1, self._rank_counts, torch.empty_like(arrived_N1))
        order = self._dispatch.forward
        return pick(rows_N1, order.rows_TK, drops=order.drops).squeeze(2).to(like_TK.dtype)
