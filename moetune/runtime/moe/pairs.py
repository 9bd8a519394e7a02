"""(token, choice) pairs: their combine weights at the experts, and the weights' gradients.

The memory policies call this. Each pair's weight travels to its expert once per step, and its
gradient travels back. The expert applies the weight after the activation, before the
down-projection. Results then need no weight at the tokens, are summed as they come, and are not
saved. If a token's row travels once for several pairs, each pair's place travels with its weight.

T tokens, K choices, N rows this rank sends, R rows it receives, D model width.
"""

from collections.abc import Sequence
from types import MappingProxyType

import torch

from moetune.comm.group import Communicator, Done, Transfer
from moetune.runtime.moe.dispatch import Dispatch
from moetune.runtime.moe.token_rows import ReceivedTokens

_DOT_VALUES = MappingProxyType({"cpu": 2**15, "cuda": 2**25})
"""The number of products in memory at once."""


def dots(a_NKD: torch.Tensor, b_ND: torch.Tensor, out_NK: torch.Tensor) -> None:
    """Write the dot products of each row of `a` with the same row of `b`.

    Products of two-byte values are summed in float32, unrounded.
    """
    most = _DOT_VALUES.get(a_NKD.device.type, _DOT_VALUES["cuda"])
    step = max(1, most // max(1, a_NKD[:1].numel()))
    for low in range(0, len(b_ND), step):
        some = slice(low, low + step)
        a, b = a_NKD[some], b_ND[some].unsqueeze(1)
        products = a.float().mul_(b) if a.dtype.itemsize < torch.float32.itemsize else a * b
        if products.dtype == out_NK.dtype:
            torch.sum(products, dim=2, out=out_NK[some])
        else:
            out_NK[some] = products.sum(dim=2)


def of_pairs(values_N: torch.Tensor, dispatch: Dispatch, like_TK: torch.Tensor) -> torch.Tensor:
    """Return values, given in sending order, at their (T, K) places; 0 for other pairs."""
    made_TK = like_TK.new_zeros(like_TK.shape)
    made_TK.view(-1).index_copy_(0, dispatch.pairs_N, values_N.to(like_TK.dtype))
    return made_TK


def weigh_(rows: torch.Tensor, weights_R1: torch.Tensor) -> torch.Tensor:
    """Multiply each row by its weight in place; a GPU rounds once."""
    # A CPU would make a copy of the rows in the weights' wider dtype.
    return rows.mul_(weights_R1 if rows.is_cuda else weights_R1.to(rows.dtype))


class PairWeights:
    """The exchange of a step's combine weights, and of their gradients."""

    def __init__(self, dispatch: Dispatch, communicator: Communicator) -> None:
        self._dispatch = dispatch
        self._communicator = None if communicator.num_ranks == 1 else communicator
        self._places_R = dispatch.by_expert()
        self._travelling: torch.Tensor

    def send(self, weights_TK: torch.Tensor, name: str) -> Transfer:
        """Start sending the weights, and the places of their rows, to the experts."""
        dispatch = self._dispatch
        values_N = weights_TK.reshape(-1, 1).index_select(0, dispatch.pairs_N)
        if self._communicator is None:
            self._travelling = values_N
            return Done()
        if dispatch.places_N is not None:  # below 2^24 in float32, which is exact
            wide = torch.promote_types(values_N.dtype, torch.float32)
            values_N = torch.cat((values_N.to(wide), dispatch.places_N.to(wide).unsqueeze(1)), 1)
        values_N = _transpose_blocks(values_N, dispatch.counts.send_CP)
        send, receive = _by_rank(dispatch.counts.send_CP), _by_rank(dispatch.counts.receive_CP)
        self._travelling = values_N.new_empty(sum(receive), values_N.shape[1])
        return self._communicator.all_to_all(self._travelling, values_N, receive, send, name)

    def arrived(self, dtype: torch.dtype) -> tuple[torch.Tensor, ReceivedTokens | None]:
        """Return the weights (R, 1) by (chunk, expert), and the order in which their rows arrive.

        Args:
            dtype: dtype of the weights.
        """
        values_R, counts = self._travelling, self._dispatch.counts
        if self._places_R is not None:
            values_R = values_R.index_select(0, self._places_R)
        if counts.tokens is None:
            return values_R, None
        num_rows = sum(map(sum, counts.tokens.receive_CP))
        received = ReceivedTokens.of(
            values_R[:, 1].long(), counts.receive_PCL, counts.tokens.received_CP, num_rows
        )
        return values_R[:, :1].to(dtype).contiguous(), received

    def send_back(self, grads_R1: torch.Tensor, name: str) -> Transfer:
        """Start sending the weights' gradients back; they are (R, 1) by (chunk, expert)."""
        if self._communicator is None:
            self._travelling = grads_R1
            return Done()
        if self._places_R is not None:
            grads_R1 = torch.empty_like(grads_R1).index_copy_(0, self._places_R, grads_R1)
        counts = self._dispatch.counts
        send, receive = _by_rank(counts.send_CP), _by_rank(counts.receive_CP)
        self._travelling = grads_R1.new_empty(sum(send), 1)
        return self._communicator.all_to_all(self._travelling, grads_R1, send, receive, name)

    def returned(self, like_TK: torch.Tensor) -> torch.Tensor:
        """Return the gradients that came back, in the shape of `like_TK`; 0 for dropped pairs."""
        rows_N1, dispatch = self._travelling, self._dispatch
        if self._communicator is not None:
            rows_N1 = _transpose_blocks(rows_N1, list(zip(*dispatch.counts.send_CP, strict=True)))
        return of_pairs(rows_N1.squeeze(1), dispatch, like_TK)


def _by_rank(counts_CP: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of rows of all chunks, by rank."""
    return list(map(sum, zip(*counts_CP, strict=True)))


def _transpose_blocks(rows: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the blocks [i][j] of `rows` in the order [j][i]."""
    if len(counts) == 1 or len(counts[0]) == 1:
        return rows
    blocks = iter(torch.split(rows, [count for line in counts for count in line]))
    grid = [[next(blocks) for _ in line] for line in counts]
    return torch.cat([block for column in zip(*grid, strict=True) for block in column])
