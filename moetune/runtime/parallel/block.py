"""A transformer block with a dense FFN or experts, of torch's plain layers.

Profiles measure the host's work of a block on these modules, and the example's language model is
built of them. B sequences, S tokens each, D model width.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from moetune.runtime.moe.expert_layer import ExpertLayer


class Attention(nn.Module):
    """Causal self-attention; a rank may have the rows of some heads alone."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.head_width = d_model // num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D)."""
        heads = self.qkv(x_BSD).unflatten(-1, (-1, 3, self.head_width))
        query, key, value = heads.permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, d_model: int, d_hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d_model, d_hidden), nn.Linear(d_hidden, d_model)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D)."""
        result: torch.Tensor = self.down(functional.gelu(self.up(x_BSD)))
        return result


class TransformerBlock(nn.Module):
    """Attention, then experts or a dense FFN, each after a norm and with a residual connection.

    Args:
        balance: weight of the experts' balance loss, added to the gradients alone.
    """

    def __init__(
        self, attention: Attention, ffn: nn.Module, d_model: int, balance: float = 0.0
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention, self.ffn, self.balance = attention, ffn, balance

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D)."""
        x_BSD = x_BSD + self.attention(self.norm1(x_BSD))
        x_BSD = x_BSD + self.ffn(self.norm2(x_BSD))
        if self.balance and isinstance(self.ffn, ExpertLayer):
            x_BSD = with_loss(x_BSD, self.ffn.aux_loss, self.balance)
        return x_BSD


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
