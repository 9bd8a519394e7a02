"""A step's dispatch: the rows of each chunk, their order, and every rank's counts of them.

`cells` makes it between `gate` and `function` in `MoELayer.forward`.

T tokens of this rank, K choices a token, N rows to send (without dropped pairs), P ranks, C pieces,
L local experts of a rank, R rows that this rank receives.

Tokens are cut into chunks of almost equal size. Forward and backward may have different degrees, so
rows are counted by *pieces*: the finest cut of the tokens of which every chunk, of either phase, is
a run. On the sender a chunk's rows are ordered by (target rank, piece, local expert, token). On the
receiver they are ordered by (piece, local expert, source rank, token), so that one GEMM takes all
of an expert's rows in a run of pieces.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from moetune.runtime.moe.products import RowPart


def slices_of(sizes: Iterable[int]) -> tuple[slice, ...]:
    """Return slices of these sizes, one after another."""
    ends = itertools.accumulate(sizes, initial=0)
    return tuple(slice(low, high) for low, high in itertools.pairwise(ends))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedRows:
    """Bounds of all rows that this rank's experts compute, for grouped kernels.

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
    parts: tuple[tuple[RowPart, ...], ...]

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
                (RowPart(rows=mine, rows_CL=rows_CL[low:high]),)
                for mine, (low, high) in zip(rows, chunks, strict=True)
            )
            return cls(rows=rows, parts=tuple(parts))
        hot_RL, places = grouped.one_hot_RL, slices_of(map(sum, rows_CL))
        pieces = [
            RowPart(
                rows=rows_of, rows_CL=rows_CL[piece : piece + 1], piece=piece,
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
        layout: places of the chunks among the received rows.
    """

    pairs_N: torch.Tensor
    tokens_N: torch.Tensor
    rows_TK: torch.Tensor
    chunk_pieces: tuple[int, ...]
    send_counts: tuple[tuple[int, ...], ...]
    receive_counts: tuple[tuple[int, ...], ...]
    layout: ChunkLayout

    @property
    def drops(self) -> bool:
        """Whether pairs may be without a row."""
        return len(self.pairs_N) < self.num_pairs

    def weights_of_rows(self, weights_TK: torch.Tensor) -> torch.Tensor:
        """Return the combine weight of every row (N,)."""
        return weights_TK.reshape(-1).index_select(0, self.pairs_N)

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
        """Tokens of every chunk: all pairs of a token are in the same one."""
        num_tokens, degree = len(self.rows_TK), self.degree
        bounds = [num_tokens * chunk // degree for chunk in range(degree + 1)]
        return tuple(slice(low, high) for low, high in itertools.pairwise(bounds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """One step's routing, for both phases.

    Args:
        counts: rows that this rank sends and receives.
        grouped: what grouped kernels need to know; None where products are computed one by one.
        shards: numbers of tokens that are cut into chunks for themselves; none for all at once.
    """

    forward: PhaseOrder
    backward: PhaseOrder
    counts: RowCounts
    grouped: GroupedRows | None = None
    shards: tuple[int, ...] = ()

    @property
    def num_dropped(self) -> int:
        """Pairs over the capacity; in shards, of which other ranks have pairs, 0."""
        return 0 if self.shards else self.forward.num_pairs - len(self.forward.pairs_N)

    @property
    def is_single_chunk(self) -> bool:
        """Whether both phases have one chunk, so that there is no buffer to reuse."""
        return self.forward.degree == self.backward.degree == 1

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Tensors that live until the backward pass, each with a storage of its own."""
        order, other = self.forward, self.backward
        tensors = [order.pairs_N, order.rows_TK, order.tokens_N]
        tensors += [other.pairs_N, other.rows_TK, other.tokens_N]
        tensors += () if self.grouped is None else self.grouped.tensors
        return tuple({id(tensor): tensor for tensor in tensors}.values())

    @property
    def num_received(self) -> int:
        """Rows that this rank's experts see in the step."""
        return sum(map(sum, self.counts.rows_CL))

    def by_expert(self, chunk_pieces: Sequence[int]) -> torch.Tensor | None:
        """Return for each row by (piece, expert, source) its place by (source, piece, expert).

        `rows.index_select(0, places)` sorts by expert, and `index_copy_` with the same places sorts
        back. Places count from the beginning of the row's chunk.

        Args:
            chunk_pieces: bounds of the chunks, in pieces.

        Returns:
            (R,); None where both orders are the same: with one source rank, or with one expert and
            piece in every chunk.
        """
        counts_PCL = self.counts.receive_PCL
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
        return _places(starts_CLP, counts_CLP, self.num_received)

    def by_expert_in_step(self) -> torch.Tensor | None:
        """Return for each received row by (piece, expert) its place by (expert, piece).

        Returns:
            (R,); None with one piece, where both orders are the same.
        """
        counts_CL = self.counts.receive_PCL.sum(0)
        if len(counts_CL) == 1:
            return None
        starts_CL = _before(counts_CL.T.reshape(-1)).view(counts_CL.T.shape).T
        return _places(starts_CL, counts_CL, self.num_received)

    def whole_part(self, in_order: Callable[[torch.Tensor], torch.Tensor]) -> RowPart:
        """Return all received rows of the step by expert.

        Args:
            in_order: orders values of rows by (piece, expert).
        """
        rows_L = [sum(cells) for cells in zip(*self.counts.rows_CL, strict=True)]
        grouped, hot_RL = self.grouped, None
        if grouped is not None and grouped.one_hot_RL is not None:
            hot_RL = in_order(grouped.one_hot_RL)
        return RowPart(
            rows=slice(0, sum(rows_L)), rows_CL=[rows_L], experts_RE=hot_RL,
            ends_E=self.counts.receive_PCL.sum((0, 1)).cumsum(0, dtype=torch.int32),
        )  # fmt: skip


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
