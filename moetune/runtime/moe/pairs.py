"""Sums over a token's choices and products by pair: what happens at the tokens.

The memory policies call this on rows in sending order. Sums follow the order of the choices and
are in float32 for two-byte values, rounded once: the order in which rows arrive changes no bit.

T tokens, K choices, N rows, D width.
"""

from types import MappingProxyType

import torch

_SUM_VALUES = MappingProxyType({"cpu": 2**18, "cuda": 2**26})
"""Values that are picked at once, before they are summed: few enough for a CPU's cache, and many
enough to keep a GPU's kernel launches few."""
_DOT_VALUES = MappingProxyType({"cpu": 2**15, "cuda": 2**25})
"""Products that are in memory at once."""


def pick(rows_ND: torch.Tensor, rows_TK: torch.Tensor, *, drops: bool) -> torch.Tensor:
    """Return every pair's row (T, K, D), zeros for dropped pairs.

    Args:
        rows_TK: the row of every pair; below 0, or N or more, for dropped pairs.
        drops: whether there are any.
    """
    num_rows, width = rows_ND.shape
    shape = *rows_TK.shape, width
    if not num_rows:
        return rows_ND.new_zeros(shape)
    if not drops:
        return rows_ND.index_select(0, rows_TK.reshape(-1)).view(shape)
    picked = rows_ND.index_select(0, rows_TK.clamp(0, num_rows - 1).view(-1)).view(shape)
    is_dropped_TK = (rows_TK < 0) | (rows_TK >= num_rows)
    return picked.masked_fill_(is_dropped_TK.unsqueeze(2), 0)


def sum_pairs(
    rows_ND: torch.Tensor, rows_TK: torch.Tensor, out_TD: torch.Tensor, *, drops: bool
) -> None:
    """Write the sum of every token's rows.

    Args:
        rows_TK, drops: as in `pick`.
    """
    num_tokens, top_k = rows_TK.shape
    if top_k == 1 and not drops:
        torch.index_select(rows_ND, 0, rows_TK.view(-1), out=out_TD)
        return
    step = _step(_SUM_VALUES, rows_ND, top_k * rows_ND.shape[1])
    for low in range(0, num_tokens, step):
        some = slice(low, low + step)
        # Without a name, so that one block's rows are gone when the next one's are picked.
        torch.sum(pick(rows_ND, rows_TK[some], drops=drops), dim=1, out=out_TD[some])


def dots(a_NKD: torch.Tensor, b_ND: torch.Tensor, out_NK: torch.Tensor) -> None:
    """Write the dot products of every row of `a` with its row of `b`.

    Products of two-byte values are summed as float32 ones, unrounded.
    """
    step = _step(_DOT_VALUES, a_NKD, a_NKD[:1].numel())
    for low in range(0, len(b_ND), step):
        some = slice(low, low + step)
        a, b = a_NKD[some], b_ND[some].unsqueeze(1)
        products = a.float().mul_(b) if a.dtype.itemsize < torch.float32.itemsize else a * b
        if products.dtype == out_NK.dtype:
            torch.sum(products, dim=2, out=out_NK[some])
        else:
            out_NK[some] = products.sum(dim=2)


def weigh_(rows: torch.Tensor, weights_R1: torch.Tensor) -> torch.Tensor:
    """Multiply every row by its weight, in place, rounded once on a GPU."""
    # A CPU would make a copy of the rows in the weights' wider dtype.
    return rows.mul_(weights_R1 if rows.is_cuda else weights_R1.to(rows.dtype))


def _step(values: MappingProxyType[str, int], like: torch.Tensor, width: int) -> int:
    return max(1, values.get(like.device.type, values["cuda"]) // max(1, width))
