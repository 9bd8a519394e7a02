"""A byte-level language model with MoE blocks, small enough to read: the worked example.

B sequences, S bytes each, D model width, V = 256 byte values.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from moetune.runtime.layer import MoELayer

NUM_BYTES = 256


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D)."""
        batch, length, width = x_BSD.shape
        heads = self.qkv(x_BSD).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return result


class Block(nn.Module):
    """Attention, then experts, each behind a norm and beside a residual."""

    def __init__(self, d_model: int, num_heads: int, moe: MoELayer) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = Attention(d_model, num_heads)
        self.moe = moe

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """Return (B, S, D)."""
        x_BSD = x_BSD + self.attention(self.norm1(x_BSD))
        result: torch.Tensor = x_BSD + self.moe(self.norm2(x_BSD))
        return result


class ByteLanguageModel(nn.Module):
    """Predicts the next byte.

    Args:
        context: the largest S.
        make_moe: returns one MoE layer; it is called once a block.
    """

    def __init__(
        self,
        *,
        d_model: int,
        num_heads: int,
        num_blocks: int,
        context: int,
        make_moe: Callable[[], MoELayer],
    ) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, d_model)
        self.places = nn.Embedding(context, d_model)
        blocks = (Block(d_model, num_heads, make_moe()) for _ in range(num_blocks))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, NUM_BYTES)

    def forward(self, text_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean cross-entropy of every next byte, in nats, and the balance loss.

        Args:
            text_BS: (B, S + 1) bytes as int64; the last ones are only predicted.
        """
        known, wanted = text_BS[:, :-1], text_BS[:, 1:]
        places = torch.arange(known.shape[1], device=known.device)
        x_BSD = self.blocks(self.bytes(known) + self.places(places))
        logits = self.head(self.norm(x_BSD))
        loss = functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        layers = [block.moe for block in self.blocks if isinstance(block, Block)]
        return loss, torch.stack([layer.aux_loss for layer in layers]).mean()
