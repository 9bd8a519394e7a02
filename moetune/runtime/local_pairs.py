"""Which rows this rank's experts compute where every rank sees all tokens.

T tokens, K choices a token, R (token, choice) pairs of this rank's experts, L local experts.
Rows lie by (piece, local expert, token), where a chunk of either phase is a run of whole pieces:
see `moetune.runtime.dispatch`. Every shard of the tokens is cut alike, so that a chunk's sums
are some of each rank's.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moetune.runtime.dispatch import common_pieces
from moetune.runtime.experts import Blocks, blocks_of
from moetune.runtime.pipeline import slices_of
from moetune.runtime.shards import Parts, all_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One phase's chunks.

    Args:
        tokens: the tokens of every chunk, by shard.
        rows: where its pairs lie among all of them.
        blocks: its experts' rows, from the chunk's first on.
    """

    tokens: tuple[Parts, ...]
    rows: tuple[slice, ...]
    blocks: tuple[Blocks, ...]

    @property
    def degree(self) -> int:
        """Number of chunks."""
        return len(self.tokens)

    @property
    def most_rows(self) -> int:
        """Rows of the largest chunk."""
        sizes: list[int] = [rows.stop - rows.start for rows in self.rows]
        return max(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPairs:
    """The pairs of this rank's experts, cut for both phases.

    Args:
        pairs_R: token·K + choice.
        tokens_R: their tokens.
    """

    pairs_R: torch.Tensor
    tokens_R: torch.Tensor
    forward: Cut
    backward: Cut


def local_pairs(
    experts_TK: torch.Tensor,
    *,
    num_tokens: Sequence[int],
    first_expert: int,
    num_experts: int,
    forward_degree: int,
    backward_degree: int,
) -> LocalPairs:
    """Return the pairs whose expert is one of `num_experts` from `first_expert` on.

    Args:
        experts_TK: chosen experts, shard after shard.
        num_tokens: of every shard.
    """
    places, *phases = common_pieces(forward_degree, backward_degree)
    num_pieces, device = len(places) - 1, experts_TK.device
    bounds = [
        [shard.start + num * place // places[-1] for place in places]
        for shard, num in zip(all_parts(num_tokens), num_tokens, strict=True)
    ]
    sizes = [high - low for shard in bounds for low, high in itertools.pairwise(shard)]
    piece_T = torch.arange(num_pieces, device=device).repeat(len(bounds))
    piece_T = piece_T.repeat_interleave(
        torch.tensor(sizes, device=device), output_size=len(experts_TK)
    )
    local_TK = experts_TK - first_expert
    is_local_TK = (local_TK >= 0) & (local_TK < num_experts)
    cell_TK = piece_T.unsqueeze(1) * num_experts + local_TK
    cells = torch.where(is_local_TK, cell_TK, num_pieces * num_experts).reshape(-1)
    counts = torch.bincount(cells, minlength=num_pieces * num_experts + 1)[:-1]
    counts_CL: list[list[int]] = counts.view(num_pieces, num_experts).tolist()
    pairs_R = torch.sort(cells, stable=True).indices[: sum(map(sum, counts_CL))]
    forward, backward = (_cut(counts_CL, bounds, pieces) for pieces in phases)
    return LocalPairs(
        pairs_R=pairs_R,
        tokens_R=pairs_R // experts_TK.shape[1],
        forward=forward,
        backward=backward,
    )


def _cut(
    counts_CL: list[list[int]], bounds: Sequence[Sequence[int]], pieces: tuple[int, ...]
) -> Cut:
    """Return the chunks that are these runs of pieces.

    Args:
        bounds: [shard][piece] in tokens.
    """
    chunks = list(itertools.pairwise(pieces))
    counts = [counts_CL[low:high] for low, high in chunks]
    return Cut(
        tokens=tuple(
            tuple(slice(shard[low], shard[high]) for shard in bounds) for low, high in chunks
        ),
        rows=slices_of(sum(map(sum, each)) for each in counts),
        blocks=tuple(map(blocks_of, counts)),
    )
