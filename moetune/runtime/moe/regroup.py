"""Reorder received rows: by source rank on the wire, by expert for the GEMMs.

The memory policies `keep` and `reuse` do this before and after a chunk's computation.

N rows this rank sends, R rows it receives, K choices a token.
"""

import itertools
from collections.abc import Sequence

import torch

from moetune.comm.group import Communicator
from moetune.runtime.moe.dispatch import Dispatch, PhaseOrder


class Regroup:
    """One chunk's reordering between (source, piece, expert) and (piece, expert, source).

    Args:
        counts_PCL: [source][piece][local expert] rows of the whole step.
        pieces: first and one past the last piece of the chunk.

    Attributes:
        changes_nothing: with one source rank or one local expert both orders are the same.
    """

    def __init__(
        self, counts_PCL: Sequence[Sequence[Sequence[int]]], pieces: Sequence[int]
    ) -> None:
        low, high = pieces
        self._by_source = [
            [count for cells in by_piece[low:high] for count in cells] for by_piece in counts_PCL
        ]
        self._by_expert = list(zip(*self._by_source, strict=True))
        self.changes_nothing = len(self._by_source) == 1 or len(self._by_expert) == 1

    def by_expert(self, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return the rows (R, D) in the order of the experts, in `out`."""
        return transpose_blocks(rows, self._by_source, out)

    def by_source(self, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return the rows (R, D) in the order of the sources, in `out`."""
        return transpose_blocks(rows, self._by_expert, out)


def regroups(dispatch: Dispatch, order: PhaseOrder) -> list[Regroup]:
    """Return the reordering of every chunk of a phase."""
    return [
        Regroup(dispatch.counts_PCL, pieces) for pieces in itertools.pairwise(order.chunk_pieces)
    ]


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
        self._regroup = Regroup(dispatch.counts_PCL, (0, order.chunk_pieces[-1]))

    def send(self, weights_TK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights of the rows that this rank receives, (R, 1) by piece and expert."""
        rows_N1 = weights_TK.reshape(-1)[self._dispatch.forward.pairs_N].to(dtype).unsqueeze(1)
        rows_N1 = transpose_blocks(rows_N1, self._chunk_counts, torch.empty_like(rows_N1))
        arrived_R1 = rows_N1.new_empty(sum(self._receive), 1)
        self._exchange(arrived_R1, rows_N1, self._receive, self._send, "the exchange of weights")
        if self._regroup.changes_nothing:
            return arrived_R1
        return self._regroup.by_expert(arrived_R1, torch.empty_like(arrived_R1))

    def return_grads(self, grads_R1: torch.Tensor, like_TK: torch.Tensor) -> torch.Tensor:
        """Return the gradients of the weights, 0 for dropped pairs, shaped as `like_TK`."""
        if not self._regroup.changes_nothing:
            grads_R1 = self._regroup.by_source(grads_R1, torch.empty_like(grads_R1))
        arrived_N1 = grads_R1.new_empty(sum(self._send), 1)
        name = "the exchange of the weights' gradients"
        self._exchange(arrived_N1, grads_R1, self._send, self._receive, name)
        rows_N1 = transpose_blocks(arrived_N1, self._rank_counts, torch.empty_like(arrived_N1))
        grads_TK = torch.zeros_like(like_TK)
        pairs_N = self._dispatch.forward.pairs_N
        grads_TK.view(-1)[pairs_N] = rows_N1.squeeze(1).to(like_TK.dtype)
        return grads_TK

    def _exchange(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        take: list[int],
        give: list[int],
        name: str,
    ) -> None:
        self._communicator.all_to_all(output, rows, take, give, name, is_alone=True).wait()
