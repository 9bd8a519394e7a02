"""Received rows from the order of their sources to that of the experts, and back."""

import itertools
from collections.abc import Sequence

import torch


class Regroup:
    """One chunk's change of order between (source, piece, expert) and (piece, expert, source).

    Args:
        counts_PCL: [source][piece][local expert] rows of the whole step.
        pieces: first and one past the last piece of the chunk.
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


def transpose_blocks(
    rows: torch.Tensor, counts: Sequence[Sequence[int]], out: torch.Tensor
) -> torch.Tensor:
    """Return the blocks [i][j] of `rows` in the order [j][i]."""
    blocks = iter(torch.split(rows, list(itertools.chain.from_iterable(counts))))
    grid = [[next(blocks) for _ in line] for line in counts]
    flat = [block for column in zip(*grid, strict=True) for block in column]
    return torch.cat(flat, out=out)
