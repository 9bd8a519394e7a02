"""Tokens of a tensor-parallel group: all on every rank, or in shards; and each rank's pairs.

Between `gate` and `function` in `TensorExpertLayer.forward`, in place of `dispatch`.

T tokens of the group, S of this rank, K choices, R pairs of this rank's experts.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moetune.comm.agree import few_values
from moetune.comm.group import Communicator
from moetune.comm.transfer import Transfer
from moetune.runtime.moe.cells import common_pieces, sorted_pairs
from moetune.runtime.moe.dispatch import ChunkLayout, GroupedRows
from moetune.runtime.moe.gate_function import counts_of
from moetune.runtime.moe.workspace import MemoryTracker

Parts = tuple[slice, ...]
"""A slice of each shard's tokens, by their places among all T."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSharing:
    """The distribution of tokens over the ranks, and the exchanges that it needs.

    Args:
        num_tokens: of every shard, in the order of the ranks; of one where all ranks have all.
        in_shards: each rank has a shard of the tokens.
    """

    communicator: Communicator
    num_tokens: tuple[int, ...]
    in_shards: bool

    def gather(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Return (T, …) from this rank's part of it, of shards by one all-gather."""
        if not self.in_shards:
            return values
        return self.communicator.all_gather_rows(values, self.num_tokens, name)

    def output(self, what: str, sums: torch.Tensor, tracker: MemoryTracker) -> torch.Tensor:
        """Return memory for this rank's part of the sums (T, …), which may be `sums` itself.

        Args:
            what: purpose of the memory, for the error.
        """
        if not self.in_shards:
            return sums
        return tracker.empty(what, (self.num_tokens[self.communicator.rank], *sums.shape[1:]), sums)

    def reduce(self, parts: Parts, sums: torch.Tensor, own: torch.Tensor, name: str) -> Transfer:
        """Start summing some tokens over the ranks: an all-reduce, of shards a reduce-scatter.

        Args:
            parts: those tokens.
            sums: (T, …), this rank's.
            own: the memory from `output`, for this rank's part of the result.
        """
        if not self.in_shards:
            return self.communicator.all_reduce(sums[parts[0]], name)
        rank = self.communicator.rank
        first, mine = sum(self.num_tokens[:rank]), parts[rank]
        into = own[mine.start - first : mine.stop - first]
        return self.communicator.reduce_scatter(into, [sums[part] for part in parts], name)


def all_tokens(num_tokens: Sequence[int]) -> Parts:
    """Return all tokens of every shard."""
    ends = [sum(num_tokens[: place + 1]) for place in range(len(num_tokens))]
    return tuple(slice(end - num, end) for end, num in zip(ends, num_tokens, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChunks:
    """One phase's chunks.

    Args:
        layout: of the rows of this rank's experts.
        tokens: tokens of every chunk.
    """

    layout: ChunkLayout
    tokens: tuple[Parts, ...]

    @property
    def degree(self) -> int:
        """Number of chunks."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPairs:
    """The (token, choice) pairs of this rank's experts, cut into chunks for both phases.

    Args:
        pairs_R: the pair of every row, token·K + choice.
        tokens_R: the token of every row.
        rows_TK: the row of every pair; R or more for other ranks' pairs.
    """

    pairs_R: torch.Tensor
    tokens_R: torch.Tensor
    rows_TK: torch.Tensor
    forward: TensorChunks
    backward: TensorChunks


class LocalCells:
    """The pairs of this rank's experts by (piece, expert), before the host knows their numbers.

    Args:
        experts_TK: chosen experts, shard after shard.
        num_tokens: of every shard.
        first_expert, num_experts: pairs of `num_experts` from `first_expert` on are this rank's.
        degrees: forward and backward.

    Attributes:
        counts_CL: pairs of each cell, on the device.
    """

    def __init__(
        self,
        experts_TK: torch.Tensor,
        *,
        num_tokens: Sequence[int],
        first_expert: int,
        num_experts: int,
        degrees: tuple[int, int],
    ) -> None:
        places, *self._phases = common_pieces(*degrees)
        num_pieces, device = len(places) - 1, experts_TK.device
        self._bounds = [
            [shard.start + num * place // places[-1] for place in places]
            for shard, num in zip(all_tokens(num_tokens), num_tokens, strict=True)
        ]
        sizes = [high - low for shard in self._bounds for low, high in itertools.pairwise(shard)]
        lengths = few_values(sizes, device)
        piece_T = torch.arange(num_pieces, device=device).repeat(len(self._bounds))
        piece_T = piece_T.repeat_interleave(lengths, output_size=len(experts_TK))
        local_TK = experts_TK - first_expert
        is_local_TK = (local_TK >= 0) & (local_TK < num_experts)
        cell_TK = piece_T.unsqueeze(1) * num_experts + local_TK
        self._shape = experts_TK.shape
        self._cells = torch.where(is_local_TK, cell_TK, num_pieces * num_experts).reshape(-1)
        counts = counts_of(self._cells, num_pieces * num_experts + 1)
        self.counts_CL = counts[:-1].view(num_pieces, num_experts)

    def pairs(
        self,
        counts_CL: list[list[int]],
        groups: Callable[[torch.Tensor, int], GroupedRows] | None = None,
    ) -> LocalPairs:
        """Return the pairs in order.

        Args:
            counts_CL: the attribute, read by the host.
            groups: makes what grouped kernels need to know, of the counts and the number of rows;
                None without such kernels.
        """
        num_rows = sum(map(sum, counts_CL))
        pairs, rows = sorted_pairs(self._cells)
        pairs_R = pairs[:num_rows]
        grouped = None if groups is None else groups(self.counts_CL, num_rows)
        forward, backward = (
            _chunks(counts_CL, self._bounds, pieces, grouped) for pieces in self._phases
        )
        return LocalPairs(
            pairs_R=pairs_R, tokens_R=pairs_R // self._shape[1], rows_TK=rows.view(self._shape),
            forward=forward, backward=backward,
        )  # fmt: skip


def _chunks(
    counts_CL: list[list[int]],
    bounds: Sequence[Sequence[int]],
    pieces: tuple[int, ...],
    grouped: GroupedRows | None,
) -> TensorChunks:
    """Return a phase's chunks.

    Args:
        bounds: of the pieces in tokens, [shard][piece].
        pieces: bounds of the chunks in pieces.
    """
    return TensorChunks(
        layout=ChunkLayout.cut(counts_CL, pieces, grouped),
        tokens=tuple(
            tuple(slice(shard[low], shard[high]) for shard in bounds)
            for low, high in itertools.pairwise(pieces)
        ),
    )
