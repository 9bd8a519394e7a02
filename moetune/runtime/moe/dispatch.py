"""Plan a step's dispatch: the rows of each chunk, their order, and every rank's counts of them.

Between `gate` and `function` in `MoELayer.forward`: from the gate's choices alone, without the
tokens, it makes the orders and counts that both phases follow.

T tokens of this rank, K choices a token, N rows to send (without dropped pairs), P ranks, C pieces,
L local experts of a rank.

Tokens are cut into chunks of almost equal size. Forward and backward may have different degrees, so
rows are counted by *pieces*: the finest cut of the tokens of which every chunk, of either phase, is
a run. On the sender a chunk's rows are ordered by (target rank, piece, local expert, token). On the
receiver they are ordered by (piece, local expert, source rank, token), so that one GEMM takes all
of an expert's rows in a run of pieces.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from moetune.comm.group import Communicator
from moetune.comm.relay import Counts, Relay
from moetune.runtime.moe.kernels import Blocks, blocks_of


def slices_of(sizes: Iterable[int]) -> tuple[slice, ...]:
    """Return slices of these sizes, one after another."""
    ends = itertools.accumulate(sizes, initial=0)
    return tuple(slice(low, high) for low, high in itertools.pairwise(ends))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayout:
    """Places of each chunk's rows among all that this rank's experts compute in the step.

    Args:
        rows: of every chunk.
        blocks: rows of each expert in every chunk, counted from the chunk's first row.
    """

    rows: tuple[slice, ...]
    blocks: tuple[Blocks, ...]

    @classmethod
    def cut(cls, rows_CL: Sequence[Sequence[int]], chunk_pieces: tuple[int, ...]) -> "ChunkLayout":
        """Return the chunks that are runs of pieces.

        Args:
            rows_CL: [piece][local expert] rows.
            chunk_pieces: bounds of the chunks, in pieces.
        """
        chunks = [rows_CL[low:high] for low, high in itertools.pairwise(chunk_pieces)]
        return cls(
            rows=slices_of(sum(map(sum, rows)) for rows in chunks),
            blocks=tuple(map(blocks_of, chunks)),
        )

    @property
    def most_rows(self) -> int:
        """Rows of the largest chunk."""
        sizes: list[int] = [rows.stop - rows.start for rows in self.rows]
        return max(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseOrder:
    """One phase's chunks of rows.

    Args:
        pairs_N: the (token, choice) pair, token·K + choice, of every row in sending order.
        num_pairs: T·K, dropped ones included.
        chunk_pieces: bounds of the chunks, in pieces.
        send_counts, receive_counts: [chunk][rank] rows.
        relayed_counts: [chunk] rows that pass through this rank; empty where none do.
    """

    pairs_N: torch.Tensor
    num_pairs: int
    chunk_pieces: tuple[int, ...]
    send_counts: tuple[tuple[int, ...], ...]
    receive_counts: tuple[tuple[int, ...], ...]
    relayed_counts: tuple[Counts, ...] = ()

    def relay(self, chunk: int, *, is_homeward: bool = False) -> Relay | None:
        """Return the rows of a chunk that pass through this rank, None where none do."""
        if not self.relayed_counts:
            return None
        return Relay(counts=self.relayed_counts[chunk], is_homeward=is_homeward)

    @property
    def degree(self) -> int:
        """Number of chunks."""
        return len(self.send_counts)

    def row_of_pair(self) -> torch.Tensor:
        """Return the row of every pair (T·K,); N, one past the end, for dropped pairs."""
        num_rows = len(self.pairs_N)
        rows = self.pairs_N.new_full((self.num_pairs,), num_rows)
        rows[self.pairs_N] = torch.arange(num_rows, device=rows.device)
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """One step's routing, for both phases.

    Args:
        num_dropped: pairs over the capacity.
        counts_PCL: [source rank][piece][local expert] rows that this rank receives.
        rows_CL: [piece][local expert] the same, summed over the sources.
    """

    forward: PhaseOrder
    backward: PhaseOrder
    num_dropped: int
    counts_PCL: Sequence[Sequence[Sequence[int]]]
    rows_CL: Sequence[Sequence[int]]

    @property
    def is_single_chunk(self) -> bool:
        """Whether both phases have one chunk, so that there is no buffer to reuse."""
        return self.forward.degree == self.backward.degree == 1

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors that live until the backward pass."""
        orders = (self.forward,) if self.forward is self.backward else (self.forward, self.backward)
        return tuple(order.pairs_N for order in orders)

    @property
    def num_received(self) -> int:
        """Rows that this rank's experts see in the step."""
        return sum(sum(rows) for rows in self.rows_CL)

    def layout(self, order: PhaseOrder) -> ChunkLayout:
        """Return the places of a phase's chunks among the received rows."""
        return ChunkLayout.cut(self.rows_CL, order.chunk_pieces)


def plan_dispatch(
    experts_TK: torch.Tensor,
    kept_TK: torch.Tensor | None,
    *,
    num_experts: int,
    forward_degree: int,
    backward_degree: int,
    communicator: Communicator,
) -> Dispatch:
    """Sort this rank's pairs and exchange the ranks' counts: one small all-to-all a step.

    A hierarchical communicator exchanges those of relayed rows, too.

    Args:
        experts_TK: chosen experts.
        kept_TK: as in `Routing`.

    Raises:
        CollectiveError: the exchange failed.
    """
    places, forward_pieces, backward_pieces = common_pieces(forward_degree, backward_degree)
    num_pieces, num_ranks = len(places) - 1, communicator.num_ranks
    cells = _cells(experts_TK, kept_TK, places, num_experts)
    num_cells = num_pieces * num_experts
    counts = torch.bincount(cells, minlength=num_cells + 1)[:num_cells]
    # Not in one exchange with the agreement on tokens, on which the degrees, and so the number of
    # pieces, depend.
    send_PCL = counts.view(num_pieces, num_ranks, -1).transpose(0, 1).contiguous()
    receive_PCL = communicator.all_to_all_blocks(send_PCL, "the exchange of token counts")
    relayed_NPC = communicator.relayed_blocks(send_PCL.sum(-1), "the exchange of relayed counts")
    send, receive = torch.stack((send_PCL, receive_PCL)).tolist()
    relayed = None if relayed_NPC is None else relayed_NPC.tolist()

    def order(chunk_pieces: tuple[int, ...]) -> PhaseOrder:
        send_counts = _per_chunk(send, chunk_pieces)
        key = _sending_key(cells, chunk_pieces, num_experts, num_ranks)
        pairs = torch.sort(key, stable=True).indices
        return PhaseOrder(
            pairs_N=pairs[: sum(map(sum, send_counts))],
            num_pairs=len(pairs),
            chunk_pieces=chunk_pieces,
            send_counts=send_counts,
            receive_counts=_per_chunk(receive, chunk_pieces),
            relayed_counts=() if relayed is None else _relayed_per_chunk(relayed, chunk_pieces),
        )

    forward = order(forward_pieces)
    return Dispatch(
        forward=forward,
        backward=forward if forward_degree == backward_degree else order(backward_pieces),
        num_dropped=forward.num_pairs - len(forward.pairs_N),
        counts_PCL=receive,
        rows_CL=[
            [sum(cell) for cell in zip(*sources, strict=True)]
            for sources in zip(*receive, strict=True)
        ],
    )


def common_pieces(
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


def _cells(
    experts_TK: torch.Tensor, kept_TK: torch.Tensor | None, places: list[int], num_experts: int
) -> torch.Tensor:
    """Return the cell, piece·experts + expert, of every pair (T·K,); one past the last if dropped.

    Args:
        places: bounds of the pieces, in units of tokens / places[-1].
    """
    num_tokens = len(experts_TK)
    bounds = [num_tokens * place // places[-1] for place in places[1:]]
    tokens = torch.arange(num_tokens, device=experts_TK.device)
    piece_T = torch.bucketize(tokens, torch.tensor(bounds, device=tokens.device), right=True)
    cell_TK = piece_T.unsqueeze(1) * num_experts + experts_TK
    if kept_TK is not None:
        cell_TK = torch.where(kept_TK, cell_TK, len(bounds) * num_experts)
    return cell_TK.reshape(-1)


def _sending_key(
    cells: torch.Tensor, chunk_pieces: tuple[int, ...], num_experts: int, num_ranks: int
) -> torch.Tensor:
    """Return a key that sorts pairs by (chunk, target rank, piece, expert), dropped ones last."""
    num_cells = chunk_pieces[-1] * num_experts
    bounds = torch.tensor(chunk_pieces[1:], device=cells.device) * num_experts
    chunk = torch.bucketize(cells, bounds, right=True)
    target = torch.remainder(cells, num_experts) // (num_experts // num_ranks)
    return (chunk * num_ranks + target) * (num_cells + 1) + cells


def _per_chunk(
    counts: list[list[list[int]]], chunk_pieces: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    """Return [chunk][rank] from [rank][piece][local expert] counts."""
    return tuple(
        tuple(sum(map(sum, pieces[low:high])) for pieces in counts)
        for low, high in itertools.pairwise(chunk_pieces)
    )


def _relayed_per_chunk(
    counts: list[list[list[int]]], chunk_pieces: tuple[int, ...]
) -> tuple[Counts, ...]:
    """Return [chunk][node][rank of a node] from [node][rank of a node][piece] counts."""
    return tuple(
        [[sum(pieces[low:high]) for pieces in node] for node in counts]
        for low, high in itertools.pairwise(chunk_pieces)
    )
