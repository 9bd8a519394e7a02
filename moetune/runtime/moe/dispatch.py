"""Plan a step's dispatch: the rows of each chunk, their order, and every rank's counts of them.

Between `gate` and `function` in `MoELayer.forward`: from the gate's choices alone, without the
tokens, it makes the orders that both phases follow, on the device. `counts` reads what the host
must know.

T tokens of this rank, K choices a token, N rows to send (without dropped pairs), P ranks, C pieces,
L local experts of a rank, R rows that this rank receives.

Tokens are cut into chunks of almost equal size. Forward and backward may have different degrees, so
rows are counted by *pieces*: the finest cut of the tokens of which every chunk, of either phase, is
a run. On the sender a chunk's rows are ordered by (target rank, piece, local expert, token). On the
receiver they are ordered by (piece, local expert, source rank, token), so that one GEMM takes all
of an expert's rows in a run of pieces.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from moetune.comm.relay import Counts, Relay
from moetune.runtime.moe.counts import RowCounts
from moetune.runtime.moe.products import Part, blocks_of


def slices_of(sizes: Iterable[int]) -> tuple[slice, ...]:
    """Return slices of these sizes, one after another."""
    ends = itertools.accumulate(sizes, initial=0)
    return tuple(slice(low, high) for low, high in itertools.pairwise(ends))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedRows:
    """What grouped kernels need to know of all rows that this rank's experts compute.

    Args:
        ends_CL: (C, L) int32, one past the last row of each expert in each piece.
        one_hot_RL: (R, L), each row's expert; None without biases.
    """

    ends_CL: torch.Tensor
    one_hot_RL: torch.Tensor | None

    @classmethod
    def of(
        cls, counts_CL: torch.Tensor, num_rows: int, *, like: torch.Tensor, bias: bool
    ) -> "GroupedRows":
        """Return that of rows ordered by (piece, local expert).

        Args:
            counts_CL: rows, on the device.
            like: of the rows' dtype.
            bias: whether experts add biases.
        """
        ends_CL = counts_CL.cumsum(1, dtype=torch.int32)
        if not bias:
            return cls(ends_CL=ends_CL, one_hot_RL=None)
        experts_L = torch.arange(counts_CL.shape[1], device=counts_CL.device)
        expert_R = experts_L.repeat(len(counts_CL)).repeat_interleave(
            counts_CL.reshape(-1), output_size=num_rows
        )
        one_hot_RL = (expert_R.unsqueeze(1) == experts_L).to(like.dtype)
        return cls(ends_CL=ends_CL, one_hot_RL=one_hot_RL)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Those that live until the backward pass."""
        return (self.ends_CL,) if self.one_hot_RL is None else (self.ends_CL, self.one_hot_RL)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLayout:
    """Places of each chunk's rows among all that this rank's experts compute in the step.

    Args:
        rows: of every chunk.
        parts: of every chunk, which are computed one after another.
    """

    rows: tuple[slice, ...]
    parts: tuple[tuple[Part, ...], ...]

    @classmethod
    def cut(
        cls,
        rows_CL: Sequence[Sequence[int]],
        chunk_pieces: tuple[int, ...],
        grouped: GroupedRows | None = None,
    ) -> "ChunkLayout":
        """Return the chunks that are runs of pieces.

        Args:
            rows_CL: [piece][local expert] rows.
            chunk_pieces: bounds of the chunks, in pieces.
            grouped: where each piece is a part; otherwise each chunk is one.
        """
        chunks = tuple(itertools.pairwise(chunk_pieces))
        rows = slices_of(sum(map(sum, rows_CL[low:high])) for low, high in chunks)
        if grouped is None:
            parts = (
                (Part(rows=mine, blocks=blocks_of(rows_CL[low:high])),)
                for mine, (low, high) in zip(rows, chunks, strict=True)
            )
            return cls(rows=rows, parts=tuple(parts))
        hot_RL, places = grouped.one_hot_RL, slices_of(map(sum, rows_CL))
        pieces = [
            Part(
                rows=rows_of, blocks=blocks_of([rows_CL[piece]]), piece=piece,
                ends_E=grouped.ends_CL[piece],
                experts_RE=None if hot_RL is None else hot_RL[rows_of],
            )
            for piece, rows_of in enumerate(places)
        ]  # fmt: skip
        return cls(rows=rows, parts=tuple(tuple(pieces[low:high]) for low, high in chunks))

    @property
    def num_parts(self) -> int:
        """Parts of all chunks."""
        return sum(map(len, self.parts))

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
        tokens_N: the token of every row in sending order.
        rows_TK: the row of every pair; N or more for dropped pairs.
        chunk_pieces: bounds of the chunks, in pieces.
        send_counts, receive_counts: [chunk][rank] rows.
        relayed_counts: [chunk] rows that pass through this rank; empty where none do.
        padding_N: True where a row is of no pair, with a capacity whose rows are always as many;
            None without such rows. Chunks are then of places at the experts, not of tokens.
    """

    pairs_N: torch.Tensor
    tokens_N: torch.Tensor
    rows_TK: torch.Tensor
    chunk_pieces: tuple[int, ...]
    send_counts: tuple[tuple[int, ...], ...]
    receive_counts: tuple[tuple[int, ...], ...]
    relayed_counts: tuple[Counts, ...] = ()
    padding_N: torch.Tensor | None = None

    def relay(self, chunk: int, *, is_homeward: bool = False) -> Relay | None:
        """Return the rows of a chunk that pass through this rank, None where none do."""
        if not self.relayed_counts:
            return None
        return Relay(counts=self.relayed_counts[chunk], is_homeward=is_homeward)

    def relay_of_all(self, *, is_homeward: bool = False) -> Relay | None:
        """Return the rows of all chunks together that pass through this rank."""
        if not self.relayed_counts:
            return None
        nodes = zip(*self.relayed_counts, strict=True)
        counts = [[sum(chunks) for chunks in zip(*node, strict=True)] for node in nodes]
        return Relay(counts=counts, is_homeward=is_homeward)

    @property
    def is_padded(self) -> bool:
        """Whether rows are as many as experts can take, whatever the routing."""
        return self.padding_N is not None

    @property
    def drops(self) -> bool:
        """Whether pairs may be without a row."""
        return self.is_padded or len(self.pairs_N) < self.num_pairs

    def weights_of_rows(self, weights_TK: torch.Tensor) -> torch.Tensor:
        """Return the combine weight of every row (N,), 0 for padding."""
        weights_N = weights_TK.reshape(-1).index_select(0, self.pairs_N)
        return weights_N if self.padding_N is None else weights_N.masked_fill_(self.padding_N, 0)

    @property
    def degree(self) -> int:
        """Number of chunks."""
        return len(self.send_counts)

    @property
    def num_pairs(self) -> int:
        """T·K, dropped ones included."""
        return self.rows_TK.numel()

    @property
    def chunk_tokens(self) -> tuple[slice, ...]:
        """Tokens of every chunk: all pairs of a token are in the same one, without padding."""
        num_tokens, degree = len(self.rows_TK), self.degree
        bounds = [num_tokens * chunk // degree for chunk in range(degree + 1)]
        return tuple(slice(low, high) for low, high in itertools.pairwise(bounds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """One step's routing, for both phases.

    Args:
        counts: rows that this rank sends and receives.
        grouped: what grouped kernels need to know; None where products are computed one by one.
    """

    forward: PhaseOrder
    backward: PhaseOrder
    counts: RowCounts
    grouped: GroupedRows | None = None

    @property
    def num_dropped(self) -> int | torch.Tensor:
        """Pairs over the capacity; on the device where only that knows."""
        padding_N = self.forward.padding_N
        num_empty: int | torch.Tensor = 0 if padding_N is None else padding_N.sum()
        return self.forward.num_pairs - len(self.forward.pairs_N) + num_empty

    @property
    def is_single_chunk(self) -> bool:
        """Whether both phases have one chunk, so that there is no buffer to reuse."""
        return self.forward.degree == self.backward.degree == 1

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors that live until the backward pass, each with a storage of its own."""
        orders = (self.forward,) if self.forward is self.backward else (self.forward, self.backward)
        found = [each for order in orders for each in (order.pairs_N, order.rows_TK)]
        found += [order.tokens_N for order in orders if order.tokens_N is not order.pairs_N]
        found += [order.padding_N for order in orders if order.padding_N is not None]
        return (*found, *(() if self.grouped is None else self.grouped.tensors))

    @property
    def num_received(self) -> int:
        """Rows that this rank's experts see in the step."""
        return sum(map(sum, self.counts.rows_CL))

    def layout(self, order: PhaseOrder) -> ChunkLayout:
        """Return the places of a phase's chunks among the received rows."""
        return ChunkLayout.cut(self.counts.rows_CL, order.chunk_pieces, self.grouped)


class Cells:
    """This rank's pairs by (piece, expert), before the exchange of their numbers.

    Args:
        experts_TK: chosen experts.
        kept_TK: as in `Routing`.
        degrees: forward and backward.

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
    ) -> None:
        self.degrees = degrees
        self._shape, self._num_ranks = experts_TK.shape, num_ranks
        self._local_experts = num_experts // num_ranks
        places, *self._chunk_pieces = common_pieces(*degrees)
        num_pieces = len(places) - 1
        self._num_cells = num_pieces * num_experts
        piece_T, *self._chunk_T = _cuts(self._shape[0], degrees, experts_TK.device)
        self._experts_TK = experts_TK
        cells_TK = torch.add(experts_TK, piece_T.unsqueeze(1), alpha=num_experts)
        if kept_TK is not None:
            cells_TK = torch.where(kept_TK, cells_TK, self._num_cells)
        self._cells = cells_TK.reshape(-1)
        counts = self._cells.new_zeros(self._num_cells + 1)
        counts.scatter_add_(0, self._cells, torch.ones_like(self._cells))
        self.counts_CPL = counts[:-1].view(num_pieces, num_ranks, -1)

    def dispatch(self, counts: RowCounts, *, grouped: GroupedRows | None = None) -> Dispatch:
        """Return the step's dispatch, now that the ranks' numbers are known."""
        forward, backward = self._chunk_pieces
        order = self._order(counts, forward, self._chunk_T[0])
        other = order
        if self.degrees[0] != self.degrees[1]:
            other = self._order(counts, backward, self._chunk_T[1])
        return Dispatch(forward=order, backward=other, counts=counts, grouped=grouped)

    def _order(
        self, counts: RowCounts, chunk_pieces: tuple[int, ...], chunk_T: torch.Tensor
    ) -> PhaseOrder:
        send_counts = _per_chunk(counts.send_CP, chunk_pieces)
        key = self._cells
        if self.degrees[0] != self.degrees[1]:
            key = self._sending_key(chunk_T)
        pairs = torch.sort(key, stable=True).indices
        rows = torch.empty_like(pairs)
        rows.scatter_(0, pairs, torch.arange(len(pairs), device=pairs.device))
        pairs_N = pairs[: sum(map(sum, send_counts))]
        top_k = self._shape[1]
        return PhaseOrder(
            pairs_N=pairs_N,
            tokens_N=pairs_N if top_k == 1 else pairs_N // top_k,
            rows_TK=rows.view(self._shape),
            chunk_pieces=chunk_pieces,
            send_counts=send_counts,
            receive_counts=_per_chunk(counts.receive_CP, chunk_pieces),
            relayed_counts=_relayed_per_chunk(counts.relayed_NLC, chunk_pieces),
        )

    def _sending_key(self, chunk_T: torch.Tensor) -> torch.Tensor:
        """Return a key that sorts pairs by (chunk, target rank, piece, expert), dropped ones last.

        Where each chunk is one piece, a pair's cell is such a key.
        """
        target_TK = self._experts_TK // self._local_experts
        target_TK = target_TK.add_(chunk_T.unsqueeze(1), alpha=self._num_ranks)
        key = torch.add(self._cells, target_TK.view(-1), alpha=self._num_cells + 1)
        last = self._num_ranks * len(self.counts_CPL) * (self._num_cells + 1)
        return key.masked_fill_(self._cells == self._num_cells, last)


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


def _cuts(
    num_tokens: int, degrees: tuple[int, int], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Return each token's piece, forward chunk and backward chunk, by arithmetic on the device.

    Token t is behind the cut T·i // n, of n, where i ≤ ((t + 1)·n − 1) // T; f and b cuts are
    every b-th and f-th of n = f·b, and where f·b / gcd divides they are the same.
    """
    forward, backward = degrees
    num_cuts = forward if forward == backward else forward * backward
    token_T = torch.arange(1, num_tokens + 1, device=device)
    cut_T = token_T.mul_(num_cuts).sub_(1).floor_divide_(max(1, num_tokens))
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


def _relayed_per_chunk(
    counts_NLC: Sequence[Sequence[Sequence[int]]] | None, chunk_pieces: tuple[int, ...]
) -> tuple[Counts, ...]:
    """Return [chunk][node][rank of a node] from [node][rank of a node][piece] counts."""
    if counts_NLC is None:
        return ()
    return tuple(
        [[sum(pieces[low:high]) for pieces in node] for node in counts_NLC]
        for low, high in itertools.pairwise(chunk_pieces)
    )
