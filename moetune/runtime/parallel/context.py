"""Context parallelism: ranks share a sequence, and attention gathers its keys and values.

Rank r of c has chunks r and 2c − 1 − r of 2c, so that all ranks have as much of the causal mask.
Each chunk's queries meet the keys before them, aligned at the end, for which torch's attention has
fused kernels (Llama 3, §3.3.2, gathers keys and values, too).

B sequences, H heads, S tokens, s of them on this rank, K width of a head.
"""

from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from moetune.comm.group import Communicator

_GATHER, _SCATTER = "the gathering of keys and values", "the sums of their gradients"


def places_of_rank(length: int, communicator: Communicator) -> torch.Tensor:
    """Return the places of this rank's tokens in a sequence, ascending: (S / ranks,).

    The length divides by twice the ranks, where there are several.
    """
    ranks, rank = communicator.num_ranks, communicator.rank
    if ranks == 1:
        return torch.arange(length)
    chunks = torch.arange(length).view(2 * ranks, -1)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


def causal_attention(
    query_BHsK: torch.Tensor,
    key_BHsK: torch.Tensor,
    value_BHsK: torch.Tensor,
    communicator: Communicator,
) -> torch.Tensor:
    """Return causal attention of this rank's tokens over the whole sequence: (B, H, s, K)."""
    if communicator.num_ranks == 1:
        return functional.scaled_dot_product_attention(
            query_BHsK, key_BHsK, value_BHsK, is_causal=True
        )
    pair = torch.stack([key_BHsK, value_BHsK])
    key_BHSK, value_BHSK = _Gather.apply(pair, communicator)  # type: ignore[no-untyped-call]
    ends = _ends(key_BHSK.shape[2], communicator)
    return torch.cat(
        [
            functional.scaled_dot_product_attention(
                query, key_BHSK[:, :, :end], value_BHSK[:, :, :end],
                attn_mask=causal_lower_right(query.shape[2], end),
            )
            for query, end in zip(query_BHsK.chunk(2, dim=2), ends, strict=True)
        ],
        dim=2,
    )  # fmt: skip


def _ends(length: int, communicator: Communicator) -> tuple[int, int]:
    """Return where this rank's two chunks end."""
    ranks, rank = communicator.num_ranks, communicator.rank
    chunk = length // (2 * ranks)
    return (rank + 1) * chunk, (2 * ranks - rank) * chunk


class _Gather(torch.autograd.Function):
    """Keys and values of all ranks, in order; backward, the sums of their gradients."""

    @staticmethod
    def forward(ctx: Any, pair: torch.Tensor, communicator: Communicator) -> torch.Tensor:  # noqa: ANN401
        ctx.communicator = communicator
        ranks = communicator.num_ranks
        parts = pair.new_empty((ranks, *pair.shape))
        communicator.all_gather(parts, pair.contiguous(), _GATHER).wait()
        low, high = parts.chunk(2, dim=4)  # (ranks, 2, B, H, s / 2, K)
        return torch.cat([*low, *high.flip(0)], dim=3)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        communicator: Communicator = ctx.communicator
        ranks = communicator.num_ranks
        chunks = grad.chunk(2 * ranks, dim=3)
        shards = torch.stack(
            [torch.cat([chunks[one], chunks[2 * ranks - 1 - one]], dim=3) for one in range(ranks)]
        )
        total = torch.empty_like(shards[0])
        communicator.reduce_scatter(total, shards, _SCATTER).wait()
        return total, None
