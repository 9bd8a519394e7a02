"""What every variant trains: a randomly initialised Qwen3-MoE, and its batches.

B sequences of one rank, S tokens each, D model width, E experts.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.layouts.balanced import balanced_gate, rows_of_experts
from moetune.domain.layer import LayerShape
from moetune.domain.model import Transformer

NUM_RANKS = 2
DTYPE = "float32"
SEED = 1
LEARNING_RATE = 1e-6
"""At ten times as much, some expert gets half as many tokens again after four steps."""
_SMALLEST_SCALE = 0.1
"""A router that looks at directions of little variance loses its balance in a training step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and its batch on each of two ranks.

    Args:
        sequences: of one step on each rank.
    """

    transformer: Transformer
    sequences: int

    @property
    def tokens(self) -> int:
        """Of one step on each rank."""
        return self.sequences * self.transformer.length

    def save_model(self, folder: Path) -> float:
        """Write the initial weights, which all variants load, and return their imbalance.

        Weights are as transformers draws them, but for routers: those of a new model send several
        times as many tokens to one expert as to another, and the others' layers pad all to the
        busiest. Here each chooses all experts about alike for the batch that every step trains on.

        Returns:
            The busiest expert's tokens over the mean, the largest of any block in the first step.
        """
        torch.manual_seed(SEED)
        model = _class()(self._config())
        ratios: list[float] = []
        for number, block in enumerate(model.model.layers):
            generator = torch.Generator().manual_seed(SEED + number)
            block.mlp.gate.register_forward_pre_hook(partial(_balance, generator, ratios))
        text_NS = torch.cat([self.batch(rank) for rank in range(NUM_RANKS)])
        with torch.no_grad():
            model(input_ids=text_NS[:, :-1], use_cache=False)
        model.save_pretrained(folder)
        return max(ratios)

    def batch(self, rank: int) -> torch.Tensor:
        """Return the tokens (B, S + 1) of a rank, in every step: routers balance these."""
        generator = torch.Generator().manual_seed(SEED)
        shape = NUM_RANKS, self.sequences, self.transformer.length + 1
        text_RBS = torch.randint(self.transformer.vocab_size, shape, generator=generator)
        return text_RBS[rank]

    def _config(self) -> Any:  # noqa: ANN401 - of transformers
        from transformers import Qwen3MoeConfig

        shape, moe = self.transformer, self.transformer.moe
        return Qwen3MoeConfig(
            hidden_size=moe.d_model, moe_intermediate_size=moe.d_hidden,
            num_experts=moe.num_experts, num_experts_per_tok=moe.top_k, norm_topk_prob=True,
            num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_heads, head_dim=shape.head_dim,
            vocab_size=shape.vocab_size, max_position_embeddings=shape.length, use_cache=False,
        )  # fmt: skip


def case_of(*, num_layers: int, d_hidden: int, length: int, sequences: int) -> Case:
    """Return a Qwen3-MoE of d_model 512 with 16 experts, top-2, and eight heads."""
    layer = LayerShape(
        d_model=512, d_hidden=d_hidden, num_experts=16, top_k=2, activation="swiglu"
    )  # fmt: skip
    return Case(
        transformer=Transformer(
            moe=layer, num_layers=num_layers, num_heads=8, length=length, vocab_size=512,
            moe_every=1,
        ),
        sequences=sequences,
    )  # fmt: skip


def load_model(folder: Path, **options: Any) -> Any:  # noqa: ANN401 - a model of transformers
    """Return the model with its initial weights."""
    return _class().from_pretrained(folder, dtype=torch.float32, **options)


def _balance(
    generator: torch.Generator,
    ratios: list[float],
    router: Any,  # noqa: ANN401 - of transformers
    inputs: tuple[torch.Tensor],
) -> None:
    """Give a router weights that balance the tokens that reach it."""
    x_TD = inputs[0].flatten(0, -2)
    router.weight.copy_(
        balanced_gate(x_TD, num_experts=router.num_experts, top_k=router.top_k, generator=generator)
    )
    counts_E = rows_of_experts(x_TD @ router.weight.T, router.top_k)
    ratios.append(float(counts_E.max() / counts_E.double().mean()))


def _class() -> Any:  # noqa: ANN401 - a class of transformers
    from transformers import Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM
