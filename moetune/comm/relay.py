"""Rows that pass through a rank on their way between two others, and the order of their blocks.

A hierarchical exchange has such rows, see `hierarchical`; a flat one has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

Counts = Sequence[Sequence[int]]
"""[node][rank of a node] rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """Rows of one exchange that pass through this rank, its own among them.

    Args:
        counts: outward, from the rank with this one's place in each node to each rank of this
            node; homeward, from each rank of this node to that rank of each node.
        is_homeward: the rows go back the way that their tokens came, inside the node first.
    """

    counts: Counts
    is_homeward: bool = False


def transposed(rows: torch.Tensor, counts: Counts, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return blocks of rows in the order of the second index instead of the first.

    Args:
        rows: the blocks [i][j] of counts[i][j] rows, those of the first i first.
        out: to fill, else a new tensor.
    """
    blocks = rows.split([*chain.from_iterable(counts)])
    width = len(counts[0])
    return torch.cat([block for place in range(width) for block in blocks[place::width]], out=out)


def columns(counts: Counts) -> Counts:
    """Return counts[j][i]."""
    return tuple(zip(*counts, strict=True))


def sums(counts: Counts) -> list[int]:
    """Return the sum of each row of counts."""
    return [sum(row) for row in counts]
