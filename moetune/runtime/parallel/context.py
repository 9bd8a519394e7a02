"""Context parallelism: ranks share a sequence, and attention gathers its keys and values.

Rank r of c has chunks r and 2c − 1 − r of 2c, so that all ranks have as much of the causal mask.
Each chunk's queries meet the keys before them, aligned at the end, for which torch's attention has
fused kernels (Llama 3, §3.3.2, gathers keys and values, too). Only a rank's own keys and values are
kept for the backward pass, which gathers them again.

B sequences, H heads, S tokens, s of them on this rank, K width of a head.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from moetune.comm.group import Communicator

_GATHER, _SCATTER = "the gathering of keys and values", "the sums of their gradients"


def places_of_rank(length: int, communicator: Communicator) -> torch.Tensor:
    """Return the places of this rank's tokens in a sequence, ascending: (S / ranks,).

    The length divides by twice the ranks, where there are several.
    """
    ranks, rank = communicator.num_ranks, communicator.rank
    if ranks == 1:
        return torch.arange(length, device="cpu")
    chunks = torch.arange(length, device="cpu").view(2 * ranks, -1)
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
    # Only here: it loads torch's compiler, which takes longer than torch itself.
    from torch.nn.attention.bias import causal_lower_right

    pair = torch.stack([key_BHsK, value_BHsK])
    both_2BHSK: torch.Tensor = _Gather.apply(pair, communicator)  # type: ignore[no-untyped-call]
    key_BHSK, value_BHSK = both_2BHSK
    ends = _ends(key_BHSK.shape[2], communicator)
    again = _GatheredAgain(both_2BHSK, (key_BHsK, value_BHsK), communicator)
    with saved_tensors_hooks(again.pack, again.unpack):
        attended = [
            functional.scaled_dot_product_attention(
                query, key_BHSK[:, :, :end], value_BHSK[:, :, :end],
                attn_mask=causal_lower_right(query.shape[2], end),
            )
            for query, end in zip(query_BHsK.chunk(2, dim=2), ends, strict=True)
        ]  # fmt: skip
    return torch.cat(attended, dim=2)


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
        return _gathered(pair, communicator)

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


@dataclass(frozen=True, slots=True)
class _View:
    """A view of the gathered keys and values, as `as_strided` takes it."""

    place: tuple[Any, ...]


class _GatheredAgain:
    """Hooks for saved tensors: views of what was gathered are kept as places in it.

    The first one that a backward pass asks for gathers all, the last one lets it go.

    Args:
        own: this rank's keys and values, (B, H, s, K) each.
    """

    def __init__(
        self,
        gathered: torch.Tensor,
        own: tuple[torch.Tensor, torch.Tensor],
        communicator: Communicator,
    ) -> None:
        self._place = gathered.untyped_storage().data_ptr()
        self._own = [one.detach() for one in own]
        self._communicator = communicator
        self._num_views = self._num_left = 0
        self._gathered: torch.Tensor | None = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _View:
        """Return what is kept."""
        if tensor.untyped_storage().data_ptr() != self._place:
            return tensor
        self._num_views += 1
        return _View((tensor.shape, tensor.stride(), tensor.storage_offset()))

    def unpack(self, kept: torch.Tensor | _View) -> torch.Tensor:
        """Return the tensor; all ranks ask for the same ones in the same order."""
        if isinstance(kept, torch.Tensor):
            return kept
        if self._gathered is None:
            self._gathered = _gathered(torch.stack(self._own), self._communicator)
            self._num_left = self._num_views
        view = self._gathered.as_strided(*kept.place)
        self._num_left -= 1
        if not self._num_left:
            self._gathered = None
        return view


def _gathered(pair: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    """Return all ranks' keys and values, (2, B, H, S, K), in the order of the sequence."""
    parts = pair.new_empty((communicator.num_ranks, *pair.shape))
    communicator.all_gather(parts, pair.contiguous(), _GATHER).wait()
    low, high = parts.chunk(2, dim=4)  # (ranks, 2, B, H, s / 2, K)
    return torch.cat([*low, *high.flip(0)], dim=3)
