"""Permute a step's (token, choice) pairs: each row's target, the order, and every rank's counts.

This runs after the gate and before `function` in a layer's forward pass. `TokenPermutation` orders
pairs on the device, from the gate's choices alone. `dispatcher` reads the counts that the host
needs, and the result is a `Dispatch` for both phases.

T tokens of this rank, K choices a token, N rows to send (without dropped pairs), P ranks, C chunks,
L local experts of a rank, R rows that this rank receives.

Tokens are cut into chunks of almost equal size. The sender orders pairs by (chunk, target rank,
local expert, token). The receiver orders them by (chunk, local expert, source rank, token), so that
one GEMM takes all of an expert's rows in a chunk. If ranks have several experts, a token's row
travels once to each target rank (`token_rows`). Otherwise every pair has a row.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from moetune.comm.agree import few_values
from moetune.runtime.moe.gate import counts_of
from moetune.runtime.moe.products import GROUPED_MM, GroupedKernel, RowPart
from moetune.runtime.moe.token_rows import RowSums, SentTokens, before


def slices_of(sizes: Iterable[int]) -> list[slice]:
    """Return consecutive slices of these sizes."""
    slices, low = [], 0
    for size in sizes:
        slices.append(slice(low, low + size))
        low += size
    return slices


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """The numbers of rows in one step.

    Args:
        send_CP, receive_CP: pairs by [chunk][rank].
        rows_CL: pairs that this rank computes, by [chunk][local expert].
        receive_PCL: the same pairs by source rank, (P, C, L) on the device.
        tokens: counts of the rows that travel, if these are fewer than the pairs.
    """

    send_CP: Sequence[Sequence[int]]
    receive_CP: Sequence[Sequence[int]]
    rows_CL: Sequence[Sequence[int]]
    receive_PCL: torch.Tensor
    tokens: "TokenCounts | None" = None

    @property
    def travelling(self) -> "RowCounts | TokenCounts":
        """The counts of the rows that travel."""
        return self if self.tokens is None else self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """The numbers of tokens' rows; each row travels once to a target rank.

    Args:
        send_CP, receive_CP: rows by [chunk][rank].
        received_CP: `receive_CP` on the device.
    """

    send_CP: Sequence[Sequence[int]]
    receive_CP: Sequence[Sequence[int]]
    received_CP: torch.Tensor


class TokenPermutation:
    """The order of this rank's pairs by chunk and expert, before the ranks exchange their counts.

    Args:
        experts_TK: chosen experts.
        kept_TK: as in `Routing`.
        degree: number of chunks.

    Attributes:
        counts_CPL: pairs by chunk, target rank and expert.
        tokens: the rows that travel, if ranks have several experts; None if every pair travels.
    """

    def __init__(
        self,
        experts_TK: torch.Tensor,
        kept_TK: torch.Tensor | None,
        *,
        num_experts: int,
        num_ranks: int,
        degree: int,
    ) -> None:
        num_cells = degree * num_experts
        cells_TK, chunk_T = experts_TK.long(), None
        if degree > 1:
            chunk_T = _chunks(len(experts_TK), degree, experts_TK.device)
        self.tokens = None
        if 1 < num_ranks < num_experts:
            ranks_TK = cells_TK.div(num_experts // num_ranks, rounding_mode="floor")
            if kept_TK is not None:
                ranks_TK = torch.where(kept_TK, ranks_TK, num_ranks)
            firsts = [len(ranks_TK) * chunk // degree for chunk in range(degree)]
            firsts_C = few_values(firsts, ranks_TK.device)
            self.tokens = SentTokens(ranks_TK, chunk_T, firsts_C, num_ranks=num_ranks)
        if chunk_T is not None:
            cells_TK = torch.add(cells_TK, chunk_T.unsqueeze(1), alpha=num_experts)
        if kept_TK is not None:
            cells_TK = torch.where(kept_TK, cells_TK, num_cells)  # dropped pairs are the last
        cells = cells_TK.reshape(-1)
        counts = counts_of(cells, num_cells + 1)
        self.counts_CPL = counts[:-1].view(degree, num_ranks, -1)
        # Sorted here, so that a GPU is at work while the host waits for the numbers of rows.
        self._pairs = torch.sort(cells, stable=True).indices
        rows = torch.empty_like(self._pairs)
        rows.scatter_(0, self._pairs, torch.arange(len(rows), device=rows.device))
        self._rows_TK = rows.view(experts_TK.shape)

    @property
    def numbers_CPX(self) -> torch.Tensor:  # noqa: N802 - a tensor's dimensions
        """Counts for the other ranks: each expert's pairs, and travelling rows if fewer."""
        if self.tokens is None:
            return self.counts_CPL
        return torch.cat((self.counts_CPL, self.tokens.counts_CP.unsqueeze(2)), dim=2)

    def dispatch(self, counts: RowCounts, *, grouped: "GroupedRows | None" = None) -> "Dispatch":
        """Return the step's dispatch, once the ranks' counts are known.

        Args:
            grouped: bounds for a grouped kernel; None if each expert has a separate product.
        """
        pairs_N, top_k = self._pairs[: sum(map(sum, counts.send_CP))], self._rows_TK.shape[1]
        parts = _parts(counts.rows_CL, grouped)
        if self.tokens is None:
            sent, received = slices_of(map(sum, counts.send_CP)), [part.rows for part in parts]
            tokens_M, places_N = pairs_N if top_k == 1 else pairs_N // top_k, None
        else:
            sent, received = (
                slices_of(map(sum, rows_CP))
                for rows_CP in (counts.travelling.send_CP, counts.travelling.receive_CP)
            )
            tokens_M, places_N = self.tokens.tokens(sent[-1].stop), self.tokens.places_of(pairs_N)
        if self.tokens is None and len(pairs_N) == self._rows_TK.numel():
            starts_T = torch.arange(0, len(pairs_N), top_k, device=pairs_N.device)
            sums = RowSums(order=self._rows_TK.view(-1), starts=starts_T, is_permutation=top_k == 1)
        else:
            sums = RowSums.by(tokens_M, len(self._rows_TK))
        return Dispatch(
            pairs_N=pairs_N, rows_TK=self._rows_TK, tokens_M=tokens_M, sums=sums,
            places_N=places_N, counts=counts, sent=sent, received=received, parts=parts,
            grouped=grouped,
        )  # fmt: skip


def _chunks(num_tokens: int, degree: int, device: torch.device) -> torch.Tensor:
    """Return each token's chunk, by arithmetic on the device.

    Chunk i ends at token T·(i + 1) // degree: token t is in chunk ((t + 1)·degree − 1) // T.
    """
    ends_T = torch.arange(1, num_tokens + 1, device=device).mul_(degree).sub_(1)
    return ends_T.floor_divide_(max(1, num_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedRows:
    """The bounds of all rows that this rank's experts compute, for a grouped kernel.

    Args:
        ends_CL: (C, L) int32, one past the last row of each expert in each chunk.
        one_hot_RL: (R, L), each row's expert; None without biases.
        kernel: the kernel that takes the bounds.
    """

    ends_CL: torch.Tensor
    one_hot_RL: torch.Tensor | None
    kernel: GroupedKernel = GROUPED_MM

    @classmethod
    def of(
        cls, counts: RowCounts, *, like: torch.Tensor, bias: bool, kernel: GroupedKernel
    ) -> "GroupedRows":
        """Return the bounds of rows that are ordered by (chunk, local expert).

        Args:
            like: a tensor of the rows' dtype.
            bias: whether experts add biases.
        """
        counts_CL = counts.receive_PCL.sum(0)
        ends_CL = counts_CL.cumsum(1, dtype=torch.int32)
        if not bias:
            return cls(ends_CL=ends_CL, one_hot_RL=None, kernel=kernel)
        experts_L = torch.arange(counts_CL.shape[1], device=counts_CL.device)
        expert_R = experts_L.repeat(len(counts_CL)).repeat_interleave(
            counts_CL.reshape(-1), output_size=sum(map(sum, counts.rows_CL))
        )
        one_hot_RL = (expert_R.unsqueeze(1) == experts_L).to(like.dtype)
        return cls(ends_CL=ends_CL, one_hot_RL=one_hot_RL, kernel=kernel)


def _parts(rows_CL: Sequence[Sequence[int]], grouped: GroupedRows | None) -> list[RowPart]:
    """Return the rows of each chunk at this rank's experts."""
    rows = slices_of(map(sum, rows_CL))
    if grouped is None:
        return [
            RowPart(rows=mine, rows_E=rows_E) for mine, rows_E in zip(rows, rows_CL, strict=True)
        ]
    hot_RL = grouped.one_hot_RL
    return [
        RowPart(
            rows=mine, rows_E=rows_E, ends_E=ends_E, kernel=grouped.kernel,
            experts_RE=None if hot_RL is None else hot_RL[mine],
        )
        for mine, rows_E, ends_E in zip(rows, rows_CL, grouped.ends_CL, strict=True)
    ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """One step's routing, for both phases.

    Args:
        pairs_N: every (token, choice) pair, token·K + choice, in sending order.
        rows_TK: the place of each pair in that order; N or more for dropped pairs.
        tokens_M: the token of every row that travels, in sending order.
        sums: sums the rows that travel by token.
        places_N: for each pair, its row's place in the target rank's block of the chunk; None if
            pairs travel.
        counts: pairs and rows that this rank sends and receives.
        sent, received: each chunk's slice of the rows that this rank sends, or that arrive.
        parts: each chunk's part of the rows that this rank's experts compute.
        grouped: bounds for a grouped kernel; None if each expert has a separate product.
    """

    pairs_N: torch.Tensor
    rows_TK: torch.Tensor
    tokens_M: torch.Tensor
    sums: RowSums
    places_N: torch.Tensor | None
    counts: RowCounts
    sent: Sequence[slice]
    received: Sequence[slice]
    parts: Sequence[RowPart]
    grouped: GroupedRows | None = None

    @property
    def degree(self) -> int:
        """The number of chunks."""
        return len(self.parts)

    @property
    def num_received(self) -> int:
        """The number of rows that this rank's experts compute in the step."""
        last: int = self.parts[-1].rows.stop
        return last

    @property
    def most_rows(self) -> int:
        """The number of rows that this rank's experts compute in the largest chunk."""
        return max(map(sum, self.counts.rows_CL))

    @property
    def num_sent(self) -> int:
        """The number of rows that this rank sends in the step."""
        last: int = self.sent[-1].stop
        return last

    def tokens_of(self, chunk: int) -> slice:
        """Return the chunk's tokens: all pairs of a token are in the same chunk."""
        num_tokens = len(self.rows_TK)
        return slice(num_tokens * chunk // self.degree, num_tokens * (chunk + 1) // self.degree)

    def by_expert(self) -> torch.Tensor | None:
        """Return each pair's place in (source, chunk, expert) order, by (chunk, expert, source).

        `values.index_select(0, places)` sorts by expert, and `index_copy_` with the same places
        sorts back.

        Returns:
            (R,); None if the orders are equal: with a single source rank, or one chunk and expert.
        """
        counts_PCL = self.counts.receive_PCL
        num_ranks, degree, num_local = counts_PCL.shape
        if num_ranks == 1 or (num_local == 1 and degree == 1):
            return None
        starts_CLP = before(counts_PCL.reshape(-1)).view_as(counts_PCL).permute(1, 2, 0)
        return _places(starts_CLP, counts_PCL.permute(1, 2, 0), self.num_received)

    def by_expert_in_step(self) -> torch.Tensor | None:
        """Return each received row's place in (expert, chunk) order, by (chunk, expert).

        Returns:
            (R,); None for one chunk, because both orders are the same.
        """
        if self.degree == 1:
            return None
        counts_CL = self.counts.receive_PCL.sum(0)
        starts_CL = before(counts_CL.T.reshape(-1)).view(counts_CL.T.shape).T
        return _places(starts_CL, counts_CL, self.num_received)

    def whole_part(self, in_order: Callable[[torch.Tensor], torch.Tensor]) -> RowPart:
        """Return all received rows of the step by expert, for a grouped kernel.

        Args:
            in_order: turns values of rows in (chunk, expert) order into (expert, chunk) order.
        """
        if self.degree == 1:
            return self.parts[0]
        assert self.grouped is not None  # noqa: S101 - only a grouped kernel takes whole steps
        rows_E = list(map(sum, zip(*self.counts.rows_CL, strict=True)))
        hot_RL = self.grouped.one_hot_RL
        return RowPart(
            rows=slice(0, self.num_received), rows_E=rows_E,
            experts_RE=None if hot_RL is None else in_order(hot_RL),
            ends_E=self.counts.receive_PCL.sum((0, 1)).cumsum(0, dtype=torch.int32),
            kernel=self.grouped.kernel,
        )  # fmt: skip


def _places(starts: torch.Tensor, counts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return each row's place in another order.

    Args:
        starts: the first row of each cell in the other order.
        counts: rows of each cell, in the order of the rows.
        num_rows: the sum of `counts`.
    """
    flat = counts.reshape(-1)
    shift = starts.reshape(-1) - before(flat)
    # Without the size the host would wait for the counts.
    places_R = shift.repeat_interleave(flat, output_size=num_rows)
    places_R += torch.arange(num_rows, device=flat.device)
    return places_R
