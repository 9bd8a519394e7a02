"""Send each token once to every rank that has experts of its choice, and expand it there.

A rank with several local experts may have more than one of a token's choices. The token's row then
travels once, as does the sum of its results. The dispatchers make these rows with the permutation,
and the policies `keep` and `reuse` send them. DeepEP also counts tokens per rank.

T tokens of this rank, K choices a token, P ranks, C chunks, L local experts of a rank, M rows that
this rank sends, S rows that it receives, R (token, choice) pairs that its experts compute.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's name

from moetune.runtime.moe.gate import counts_of


def before(counts: torch.Tensor) -> torch.Tensor:
    """Return the exclusive prefix sums of the counts along the last dimension."""
    return counts.cumsum(-1).sub_(counts)


class SentTokens:
    """This rank's rows by chunk, target rank and token, before the ranks exchange their counts.

    Args:
        ranks_TK: rank of each choice; P for a dropped pair.
        chunks_T: chunk of each token; None for a single chunk.
        first_tokens_C: the first token of each chunk, on the device.

    Attributes:
        counts_CP: rows to each rank, by chunk.
    """

    def __init__(
        self,
        ranks_TK: torch.Tensor,
        chunks_T: torch.Tensor | None,
        first_tokens_C: torch.Tensor,
        *,
        num_ranks: int,
    ) -> None:
        num_tokens, top_k = ranks_TK.shape
        self._ranks_TK, self._most = ranks_TK, num_tokens * min(top_k, num_ranks)
        in_rank_TP = ranks_TK.new_zeros(num_tokens, num_ranks + 1).scatter_(1, ranks_TK, 1)
        in_rank_TP = in_rank_TP[:, :num_ranks]
        before_TP = F.pad(in_rank_TP.cumsum(0), (0, 0, 1, 0))
        before_CP = before_TP.index_select(0, first_tokens_C)
        self.counts_CP = torch.diff(before_CP, dim=0, append=before_TP[-1:])
        shifts_CP = before(self.counts_CP.reshape(-1)).view_as(before_CP) - before_CP
        if chunks_T is not None:
            before_CP, shifts_CP = before_CP[chunks_T], shifts_CP[chunks_T]
        # In a rank's block of the chunk, for its receiver; and among all rows that are sent.
        self._places_TP = before_TP[:-1] - before_CP
        self._rows_TP = torch.where(in_rank_TP > 0, before_TP[:-1] + shifts_CP, self._most)

    def places_of(self, pairs_N: torch.Tensor) -> torch.Tensor:
        """Return the place (N,) of each pair's row in its target rank's block of the chunk."""
        num_ranks = self._places_TP.shape[1]
        places_TK = self._places_TP.gather(1, self._ranks_TK.clamp(max=num_ranks - 1))
        return places_TK.reshape(-1).index_select(0, pairs_N)

    def tokens(self, num_rows: int) -> torch.Tensor:
        """Return the token (M,) of each row."""
        tokens = self._rows_TP.new_empty(self._most + 1)
        numbers_T1 = torch.arange(len(self._rows_TP), device=tokens.device).unsqueeze(1)
        return tokens.scatter_(
            0, self._rows_TP.reshape(-1), numbers_T1.expand_as(self._rows_TP).reshape(-1)
        )[:num_rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSums:
    """Sums of rows, each row in a single sum; two-byte values are summed in float32, rounded once.

    Args:
        order: the rows, sorted by sum.
        starts: the first row of each sum in that order.
        is_permutation: whether each sum has a single row.
    """

    order: torch.Tensor
    starts: torch.Tensor
    is_permutation: bool = False

    @classmethod
    def by(cls, sums: torch.Tensor, num_sums: int) -> "RowSums":
        """Return the sums that `sums` assigns the rows to."""
        order = torch.sort(sums, stable=True).indices
        return cls(order=order, starts=before(counts_of(sums, num_sums)))

    def of(self, rows: torch.Tensor, part: slice, sums: slice) -> torch.Tensor:
        """Return the sums of a chunk's rows.

        Args:
            rows: the chunk's rows.
            part, sums: the chunk's slice of all rows, and its slice of all sums.
        """
        order, starts = self.order[part], self.starts[sums]
        if part.start:
            order, starts = order - part.start, starts - part.start
        if self.is_permutation:
            return rows.index_select(0, order)
        return F.embedding_bag(order, rows, starts, mode="sum")

    def into(self, rows: torch.Tensor, part: slice, sums_TD: torch.Tensor, sums: slice) -> None:
        """Write the sums of a chunk's rows to their places; the arguments are those of `of`."""
        if self.is_permutation:
            torch.index_select(rows, 0, self.order[part] - part.start, out=sums_TD[sums])
        else:
            sums_TD[sums] = self.of(rows, part, sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedTokens:
    """The map from the rows that a rank receives to its experts' rows, and back.

    Args:
        places_R: for each expert's row, by (chunk, expert), the received row in its chunk.
        sums: sums the experts' rows by received row.
    """

    places_R: torch.Tensor
    sums: RowSums

    @classmethod
    def of(
        cls,
        places_R: torch.Tensor,
        counts_PCL: torch.Tensor,
        counts_CP: torch.Tensor,
        num_rows: int,
    ) -> "ReceivedTokens":
        """Return the map of one step.

        Args:
            places_R: for each expert's row, by (chunk, expert, source, token), the place in its
                source's block of the chunk.
            counts_PCL: experts' rows by source rank.
            counts_CP: received rows by chunk and source rank.
            num_rows: the sum of `counts_CP`.
        """
        num_ranks, num_chunks, num_local = counts_PCL.shape
        counts_CLP = counts_PCL.permute(1, 2, 0).reshape(-1)

        def of_rows(values_CP: torch.Tensor) -> torch.Tensor:
            values_CLP = values_CP.unsqueeze(1).expand(num_chunks, num_local, num_ranks)
            return values_CLP.reshape(-1).repeat_interleave(counts_CLP, output_size=len(places_R))

        places_R = places_R + of_rows(before(counts_CP))
        in_step_R = places_R
        if num_chunks > 1:
            firsts_C = before(counts_CP.sum(1))
            in_step_R = places_R + of_rows(firsts_C.unsqueeze(1).expand_as(counts_CP))
        return cls(places_R=places_R, sums=RowSums.by(in_step_R, num_rows))

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tensors to save for the backward pass."""
        return self.places_R, self.sums.order, self.sums.starts

    def expand(self, rows: torch.Tensor, part: slice, out: torch.Tensor) -> torch.Tensor:
        """Write a chunk's received rows to `out`, ordered by expert.

        Args:
            part: the chunk's slice of the experts' rows.
        """
        return torch.index_select(rows, 0, self.places_R[part], out=out)
