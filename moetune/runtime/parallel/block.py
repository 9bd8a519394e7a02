"""A transformer block with a dense FFN or experts.

Profiles measure the host's work of a block on these modules, and the example's language model is
built of them. B sequences, S tokens each, D model width.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from moetune.comm.group import Communicator, OneRank
from moetune.domain.training import Recompute
from moetune.runtime.moe.expert_layer import ExpertLayer
from moetune.runtime.parallel.context import causal_attention
from moetune.runtime.parallel.recompute import computed_again, with_norm_again
from moetune.runtime.parallel.tensor import ColumnParallelLinear, RowParallelLinear


class Attention(nn.Module):
    """Causal self-attention with heads cut over the tensor-parallel ranks.

    Args:
        sequence_parallel: whether x and the result are these ranks' shards of the sequence.
        context: the ranks that share a sequence; None is this rank alone.
        recompute: "core_attn" gathers keys and values, and attends, again in the backward pass.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        communicator: Communicator,
        *,
        sequence_parallel: bool = False,
        context: Communicator | None = None,
        recompute: Collection[Recompute] = (),
    ) -> None:
        super().__init__()
        self.core_again = "core_attn" in recompute
        self.num_heads = num_heads // communicator.num_ranks
        self.context = OneRank() if context is None else context
        self.qkv = ColumnParallelLinear(
            d_model, 3 * d_model, communicator, sequence_parallel=sequence_parallel
        )
        self.out = RowParallelLinear(
            d_model, d_model, communicator, sequence_parallel=sequence_parallel
        )

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D)."""
        qkv = self.qkv(x_BSD)
        heads = qkv.unflatten(-1, (self.num_heads, 3, -1)).permute(3, 0, 2, 1, 4)
        query, key, value = heads
        if self.core_again:
            mixed = computed_again(causal_attention, query, key, value, self.context)
        else:
            mixed = causal_attention(query, key, value, self.context)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class FeedForward(nn.Module):
    """Two linear layers whose hidden width is cut over the tensor-parallel ranks."""

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        communicator: Communicator,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(
            d_model, d_hidden, communicator, sequence_parallel=sequence_parallel
        )
        self.down = RowParallelLinear(
            d_hidden, d_model, communicator, sequence_parallel=sequence_parallel
        )

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D)."""
        result: torch.Tensor = self.down(functional.gelu(self.up(x_BSD)))
        return result


class TransformerBlock(nn.Module):
    """Attention, then experts or a dense FFN, each after a norm and with a residual connection.

    Args:
        balance: weight of the experts' balance loss, added to the gradients alone.
        recompute: modules that the backward pass computes again: "full" the block, "mlp" the dense
            FFN with its norm, "moe" the experts with their exchanges, "norm" the norm before them.
            The attention has its own.
    """

    def __init__(
        self,
        attention: Attention,
        ffn: nn.Module,
        d_model: int,
        balance: float,
        recompute: Collection[Recompute] = (),
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = attention
        self.ffn = ffn
        self.balance = balance
        self.recompute = frozenset(recompute)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D)."""
        if "full" in self.recompute:
            return computed_again(self._both_parts, x_BSD)
        return self._both_parts(x_BSD)

    def _both_parts(self, x_BSD: torch.Tensor) -> torch.Tensor:
        x_BSD = x_BSD + self.attention(self.norm1(x_BSD))
        x_BSD = x_BSD + self._fed(x_BSD)
        if self.balance and isinstance(self.ffn, ExpertLayer):
            x_BSD = with_loss(x_BSD, self.ffn.aux_loss, self.balance)
        return x_BSD

    def _fed(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Return the FFN's output, computed as `recompute` says."""
        has_experts, norm_again = isinstance(self.ffn, ExpertLayer), "norm" in self.recompute
        if ("moe" if has_experts else "mlp") not in self.recompute:
            if has_experts and norm_again:
                return with_norm_again(self.norm2, self.ffn, x_BSD)
            return self._normed_and_fed(x_BSD)
        if has_experts and not norm_again:
            return computed_again(self.ffn, self.norm2(x_BSD))
        return computed_again(self._normed_and_fed, x_BSD)

    def _normed_and_fed(self, x_BSD: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.ffn(self.norm2(x_BSD))
        return y


def with_loss(x: torch.Tensor, loss: torch.Tensor, weight: float) -> torch.Tensor:
    """Return x; backward, add the gradient of weight · loss, which later stages do not get."""
    y: torch.Tensor = _WithLoss.apply(x, loss, weight)  # type: ignore[no-untyped-call]
    return y


class _WithLoss(torch.autograd.Function):
    """The identity on x; backward it adds the gradient of a loss that later stages do not get."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor, weight: float) -> torch.Tensor:  # noqa: ANN401
        ctx.grad = loss.new_tensor(weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # noqa: ANN401
        return grad, ctx.grad, None
