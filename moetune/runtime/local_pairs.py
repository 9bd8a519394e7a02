"""Which rows this rank's experts compute where every rank sees all tokens.

T tokens, K choices a token, R (token, choice) pairs of this rank's experts, L local experts.
Rows lie by (piece, local expert, token), where a chunk of either phase is a run of whole pieces:
see `moetune.runtime.dispatch`.
"""

import itertools
from dataclasses import dataclass

import torch

from moetune.runtime.dispatch import common_pieces
from moetune.runtime.experts import Blocks, blocks_of
from moetune.runtime.pipeline import slices_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One phase's chunks.

    Args:
        tokens: the tokens of every chunk.
        rows: where its pairs lie among all of them.
        blocks: its experts' rows, from the chunk's first on.
    """

    tokens: tuple[slice, ...]
    rows: tuple[slice, ...]
    blocks: tuple[Blocks, ...]

    @property
    def degree(self) -> int:
        """Number of chunks."""
        return len(self.tokens)

    @property
    def most_rows(self) -> int:
        """Rows of the largest chunk."""
        return max(rows.stop - rows.start for rows in self.rows)


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
    first_expert: int,
    num_experts: int,
    forward_degree: int,
    backward_degree: int,
) -> LocalPairs:
    """Return the pairs whose expert is one of `num_experts` from `first_expert` on."""
    num_tokens, top_k = experts_TK.shape
    places, *phases = common_pieces(forward_degree, backward_degree)
    num_pieces = len(places) - 1
    bounds = [num_tokens * place // places[-1] for place in places]
    device = experts_TK.device
    tokens_T = torch.arange(num_tokens, device=device)
    piece_T = torch.bucketize(tokens_T, torch.tensor(bounds[1:], device=device), right=True)
    local_TK = experts_TK - first_expert
    is_local_TK = (local_TK >= 0) & (local_TK < num_experts)
    cell_TK = piece_T.unsqueeze(1) * num_experts + local_TK
    cells = torch.where(is_local_TK, cell_TK, num_pieces * num_experts).reshape(-1)
    counts = torch.bincount(cells, minlength=num_pieces * num_experts + 1)[:-1]
    counts_CL: list[list[int]] = counts.view(num_pieces, num_experts).tolist()
    order = torch.sort(cells, stable=True).indices
    pairs_R = order[: sum(map(sum, counts_CL))]
    forward, backward = (_cut(counts_CL, bounds, pieces) for pieces in phases)
    return LocalPairs(
        pairs_R=pairs_R, tokens_R=pairs_R // top_k, forward=forward, backward=backward
    )


def _cut(counts_CL: list[list[int]], bounds: list[int], pieces: tuple[int, ...]) -> Cut:
    chunks = list(itertools.pairwise(pieces))
    counts = [counts_CL[low:high] for low, high in chunks]
    return Cut(
        tokens=tuple(slice(bounds[low], bounds[high]) for low, high in chunks),
        rows=slices_of(sum(map(sum, each)) for each in counts),
        blocks=tuple(map(blocks_of, counts)),
    )
