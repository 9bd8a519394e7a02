"""A whole model: blocks of attention and a feed-forward network, some of them with experts."""

from dataclasses import dataclass

from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.domain.layout_check import nearest_divisors


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A decoder whose every `moe_every`-th block has experts instead of a dense network.

    Args:
        moe: the experts' layer; the dense networks have one expert's width and activation. A
            dense model's has a single expert: its network.
        num_layers: blocks.
        length: tokens of a sequence.
        moe_every: 1 for experts in every block, 2 for the 2nd, 4th and so on; 0 for a dense model.

    Raises:
        InputError: a size below 1, heads that do not divide the width, or experts in no block.
    """

    moe: LayerShape
    num_layers: int
    num_heads: int
    length: int
    vocab_size: int
    moe_every: int = 2

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "length", "vocab_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.moe_every < 0:
            raise InputError(f"moe_every must be at least 0, got {self.moe_every}")
        if self.moe.d_model % self.num_heads:
            near = nearest_divisors(self.moe.d_model, self.num_heads)
            raise InputError(
                f"d_model ({self.moe.d_model}) does not divide by num_heads ({self.num_heads})",
                f"use {' or '.join(map(str, near))} heads",
            )
        if self.moe_every > self.num_layers:
            raise InputError(
                f"moe_every ({self.moe_every}) is larger than num_layers ({self.num_layers}): "
                "no block has experts"
            )
        if self.is_dense and self.moe.num_experts > 1:
            raise InputError(
                f"moe_every is 0, but there are {self.moe.num_experts} experts",
                "use 1 expert for a dense model, or moe_every of at least 1",
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.moe.d_model // self.num_heads

    @property
    def is_dense(self) -> bool:
        """Whether no block has experts."""
        return self.moe_every == 0

    def has_experts(self, block: int) -> bool:
        """Return whether the block, counted from 0, has experts."""
        return not self.is_dense and (block + 1) % self.moe_every == 0

    @property
    def num_moe_layers(self) -> int:
        """Blocks with experts."""
        return 0 if self.is_dense else self.num_layers // self.moe_every

    @property
    def attention_parameters(self) -> int:
        """Of one block: query, key, value and output. Biases, under a thousandth, are left out."""
        return 4 * self.moe.d_model**2

    @property
    def norm_parameters(self) -> int:
        """Of one norm: weight and bias."""
        return 2 * self.moe.d_model

    @property
    def ffn_parameters(self) -> int:
        """Of one dense network, and of one expert."""
        return self.moe.num_gemms * self.moe.d_model * self.moe.d_hidden

    @property
    def gate_parameters(self) -> int:
        """Of one MoE layer."""
        return self.moe.d_model * self.moe.num_experts

    @property
    def token_parameters(self) -> int:
        """Of the embedding of tokens, and of the head, which shares nothing with it."""
        return self.vocab_size * self.moe.d_model

    def num_words(self, tp: int) -> int:
        """Return the tokens of the vocabulary on that of tp ranks that has the most."""
        return -(-self.vocab_size // tp)

    @property
    def num_parameters(self) -> int:
        """Of the whole model: embeddings of tokens and places, blocks, last norm and head."""
        places = self.length * self.moe.d_model
        block = self.attention_parameters + 2 * self.norm_parameters
        experts = self.gate_parameters + self.moe.num_experts * self.ffn_parameters
        num_dense = self.num_layers - self.num_moe_layers
        return (
            2 * self.token_parameters
            + places
            + self.num_layers * block
            + num_dense * self.ffn_parameters
            + self.num_moe_layers * experts
            + self.norm_parameters
        )
