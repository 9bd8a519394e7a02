"""Order a step's pairs: which rows go where in each phase, from the gate's choices alone.

Between `gate` and `function` in a layer's forward pass: all on the device, without the tokens.
`dispatcher` reads what the host must know; the result is a `dispatch.Dispatch`.

T tokens of this rank, K choices a token, N rows to send, P ranks, C pieces, L local experts.
"""

import itertools
import math
from collections.abc import Sequence

import torch

from moetune.runtime.moe.dispatch import ChunkLayout, Dispatch, GroupedRows, PhaseOrder, RowCounts
from moetune.runtime.moe.gate import counts_of


class Cells:
    """This rank's pairs by (piece, expert), before the exchange of their numbers.

    Args:
        experts_TK: chosen experts.
        kept_TK: as in `Routing`.
        degrees: forward and backward.
        shards: numbers of tokens that are cut into chunks for themselves, one shard after another;
            all tokens by default.

    Attributes:
        counts_CPL: pairs of each cell, by target rank.
    """

    def __init__(
        self,
        experts_TK: torch.Tensor,
        kept_TK: torch.Tensor | None,
        *,
        num_experts: int,
        num_ranks: int,
        degrees: tuple[int, int],
        shards: Sequence[int] = (),
    ) -> None:
        self._shards = tuple(shards)
        self._shape, self._num_ranks = experts_TK.shape, num_ranks
        self._local_experts = num_experts // num_ranks
        places, *self._chunk_pieces = _common_pieces(*degrees)
        num_pieces = len(places) - 1
        self._num_cells = num_pieces * num_experts
        piece_T, *chunks_T = _cuts(
            self._shards or self._shape[:1], degrees, experts_TK.device
        )  # fmt: skip
        self._experts_TK = experts_TK
        cells_TK = torch.add(experts_TK, piece_T.unsqueeze(1), alpha=num_experts)
        if kept_TK is not None:
            cells_TK = torch.where(kept_TK, cells_TK, self._num_cells)
        self._cells = cells_TK.reshape(-1)
        counts = counts_of(self._cells, self._num_cells + 1)
        self.counts_CPL = counts[:-1].view(num_pieces, num_ranks, -1)
        keys = [self._cells]
        if degrees[0] != degrees[1] and num_ranks > 1:
            keys = [self._sending_key(chunk_T) for chunk_T in chunks_T]
        # Sorted here, so that a GPU is at work while the host waits for the numbers of rows.
        self._orders = [_sort(key) for key in keys]

    def dispatch(self, counts: RowCounts, *, grouped: GroupedRows | None = None) -> Dispatch:
        """Return the step's dispatch, now that the ranks' numbers are known."""
        num_rows = sum(map(sum, counts.send_CP))
        sent = [(pairs[:num_rows], rows.view(self._shape)) for pairs, rows in self._orders]
        orders = {
            chunk_pieces: _order(counts, grouped, chunk_pieces, pairs_N, rows_TK)
            for chunk_pieces, (pairs_N, rows_TK) in zip(
                self._chunk_pieces, (sent[0], sent[-1]), strict=True
            )
        }
        forward, backward = (orders[chunk_pieces] for chunk_pieces in self._chunk_pieces)
        return Dispatch(
            forward=forward, backward=backward, counts=counts, grouped=grouped, shards=self._shards
        )

    def _sending_key(self, chunk_T: torch.Tensor) -> torch.Tensor:
        """Return a key that sorts pairs by (chunk, target rank, piece, expert), dropped ones last.

        Where each chunk is one piece, or there is one rank, a pair's cell is such a key.
        """
        target_TK = self._experts_TK // self._local_experts
        target_TK = target_TK.add_(chunk_T.unsqueeze(1), alpha=self._num_ranks)
        key = torch.add(self._cells, target_TK.view(-1), alpha=self._num_cells + 1)
        last = self._num_ranks * len(self.counts_CPL) * (self._num_cells + 1)
        return key.masked_fill_(self._cells == self._num_cells, last)


def _sort(key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pairs in the order of their keys, and the row of each pair."""
    pairs = torch.sort(key, stable=True).indices
    rows = torch.empty_like(pairs)
    rows.scatter_(0, pairs, torch.arange(len(pairs), device=pairs.device))
    return pairs, rows


def _order(
    counts: RowCounts,
    grouped: GroupedRows | None,
    chunk_pieces: tuple[int, ...],
    pairs_N: torch.Tensor,
    rows_TK: torch.Tensor,
) -> PhaseOrder:
    top_k = rows_TK.shape[1]
    return PhaseOrder(
        pairs_N=pairs_N,
        tokens_N=pairs_N if top_k == 1 else pairs_N // top_k,
        rows_TK=rows_TK,
        chunk_pieces=chunk_pieces,
        send_counts=_per_chunk(counts.send_CP, chunk_pieces),
        receive_counts=_per_chunk(counts.receive_CP, chunk_pieces),
        layout=ChunkLayout.cut(counts.rows_CL, chunk_pieces, grouped),
    )


def _common_pieces(
    forward_degree: int, backward_degree: int
) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
    """Return the bounds of the pieces and, in pieces, of the forward and the backward chunks.

    Those of the pieces are in 1/(f·b) of the tokens, for the degrees f and b. Their number depends
    on the degrees alone, never on this rank's tokens, because ranks exchange one count for each.
    """
    forward = range(0, forward_degree * backward_degree + 1, backward_degree)
    backward = range(0, forward_degree * backward_degree + 1, forward_degree)
    places = sorted({*forward, *backward})
    return places, tuple(map(places.index, forward)), tuple(map(places.index, backward))


def _cuts(
    shards: Sequence[int], degrees: tuple[int, int], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Return each token's piece, forward chunk and backward chunk, by arithmetic on the device.

    Token t is behind the cut T·i // n, of n, where i ≤ ((t + 1)·n − 1) // T; f and b cuts are
    every b-th and f-th of n = f·b, and where f·b / gcd divides they are the same.
    """
    forward, backward = degrees
    num_cuts = forward if forward == backward else forward * backward
    cuts = [
        torch.arange(1, num + 1, device=device).mul_(num_cuts).sub_(1).floor_divide_(max(1, num))
        for num in shards
    ]
    cut_T = cuts[0] if len(cuts) == 1 else torch.cat(cuts)
    if forward == backward:
        return cut_T, cut_T, cut_T
    forward_T, backward_T = cut_T // backward, cut_T // forward
    piece_T = (forward_T + backward_T).sub_(cut_T // math.lcm(forward, backward))
    return piece_T, forward_T, backward_T


def _per_chunk(
    counts_CP: Sequence[Sequence[int]], chunk_pieces: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Return [chunk][rank] from [piece][rank] counts."""
    return tuple(
        tuple(map(sum, zip(*counts_CP[low:high], strict=True)))
        for low, high in itertools.pairwise(chunk_pieces)
    )
