"""Time of a rank's GEMMs with uneven loads of its experts, from those measured even and uneven.

A kernel for all experts cuts the rows of each into tiles, and pads the last tile of each. Gradients
of weights are sums over an expert's rows, and that of the most loaded expert is the longest. Loads
between even ones and those of the uneven forms take a part of these forms' extra time, by tiles or
by the most loaded expert's share: measured on an H100 (docs/decisions/gpus.md#0130).
"""

from collections.abc import Sequence

import numpy as np

from moetune.domain.arrays import Floats, array_of, floats_of, is_many
from moetune.domain.gemm_forms import GemmForm, even_form, hottest_share

TILE_ROWS = 128
"""Of the kernels that multiply all experts at once, on GPUs of compute capability 9.0."""
_LEAST, _MOST = -1.0, 1.5
"""Loads with fewer tiles than even ones are faster; beyond the measured ones it is a guess."""


def unevenness(form: GemmForm, shares: Sequence[float], *, rows: float) -> float:
    """Return which part of the uneven form's extra time loads take: 0 if even, 1 as measured.

    Args:
        shares: of all rows, of each expert.
        rows: of all experts together, or an array of them.
    """
    num_experts = len(shares)
    hottest = hottest_share(num_experts)
    by_share = (max(shares) - 1 / num_experts) / (hottest - 1 / num_experts)
    if even_form(form) == "grad_weight":
        return min(by_share, _MOST)
    even = _nearly_even_tiles(rows, num_experts)
    others = _nearly_even_tiles(floats_of(rows) * (1 - hottest), num_experts - 1)
    more = _tiles(rows, [hottest]) + others - even
    found = np.where(
        more > 0, (_tiles(rows, shares) - even) / np.where(more > 0, more, 1), by_share
    )
    found = np.clip(found, _LEAST, _MOST)
    return array_of(found) if is_many(rows) else float(found)


def _tiles(rows: float, shares: Sequence[float]) -> Floats:
    each = np.multiply.outer(floats_of(rows), np.asarray(shares))
    return _whole(each)


def _nearly_even_tiles(rows: float | Floats, num_experts: int) -> Floats:
    """Return the tiles of experts with even loads, which are never equal: see `expert_rows`."""
    beside = np.zeros(num_experts)
    beside[: num_experts - 1 : 4], beside[1::4] = 1, -1
    return _whole(np.asarray(rows, float)[..., None] / num_experts + beside)


def _whole(rows: Floats) -> Floats:
    tiles: Floats = np.ceil(np.maximum(rows, 0.0) / TILE_ROWS).sum(axis=-1)
    return tiles
