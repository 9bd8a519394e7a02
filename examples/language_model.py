"""A small language model with experts, on one rank or cut by a layout into stages and shares.

B sequences, S tokens each, D model width, V tokens of the vocabulary.
"""

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from moetune.comm.group import Communicator, OneRank
from moetune.domain.layout import check_layout, stage_blocks
from moetune.domain.model import Transformer
from moetune.runtime.moe.expert_layer import ExpertLayer
from moetune.runtime.parallel.block import Attention, FeedForward, TransformerBlock
from moetune.runtime.parallel.groups import ParallelGroups
from moetune.runtime.parallel.stages import Shapes, Stages
from moetune.runtime.parallel.tensor import (
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_parallel_cross_entropy,
    vocab_range,
)


class LanguageModel(nn.Module):
    """Next-token model: all blocks, or those of one stage.

    The first block comes with the embedding, the last one with norm and head. Parameters have the
    same names under every layout.

    Args:
        make_moe: returns an MoE layer; called once for every block with experts.
        blocks: those of this stage; None for all.
        communicator: the tensor-parallel group; None is this rank alone.
        balance: weight of every layer's balance loss in the gradients.
    """

    def __init__(
        self,
        shape: Transformer,
        make_moe: Callable[[], ExpertLayer],
        *,
        blocks: range | None = None,
        communicator: Communicator | None = None,
        balance: float = 0.0,
    ) -> None:
        super().__init__()
        blocks = range(shape.num_layers) if blocks is None else blocks
        communicator = OneRank() if communicator is None else communicator
        d_model, d_hidden = shape.moe.d_model, shape.moe.d_hidden
        self.is_first, self.is_last = blocks.start == 0, blocks.stop == shape.num_layers
        if self.is_first:
            self.tokens = VocabParallelEmbedding(shape.vocab_size, d_model, communicator)
            self.places = nn.Embedding(shape.length, d_model)
        self.blocks = nn.ModuleDict()
        for block in blocks:
            experts = shape.has_experts(block)
            ffn = make_moe() if experts else FeedForward(d_model, d_hidden, communicator)
            attention = Attention(d_model, shape.num_heads, communicator)
            self.blocks[str(block)] = TransformerBlock(attention, ffn, d_model, balance)
        if self.is_last:
            self.norm = nn.LayerNorm(d_model)
            self.head = VocabParallelHead(d_model, shape.vocab_size, communicator)

    def reset_parameters(self, seed: int) -> None:
        """Draw every layer from the seed and its name: the same values under every layout."""
        for name, module in self.named_modules():
            if module is not self and hasattr(module, "reset_parameters"):
                with torch.random.fork_rng(devices=()):
                    torch.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
                    module.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's logits of the next tokens, or (B, S, D) for the next stage.

        Args:
            x: (B, S) tokens as int64, or (B, S, D) of the previous stage.
        """
        if self.is_first:
            x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.is_last else x


def next_token_loss(logits_BSV: torch.Tensor, wanted_BS: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the next tokens, in nats."""
    return functional.cross_entropy(logits_BSV.flatten(0, 1), wanted_BS.flatten())


def staged_language_model(
    shape: Transformer,
    ranks: ParallelGroups,
    *,
    num_sequences: int,
    num_micro_batches: int,
    stages_per_rank: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    balance: float = 0.0,
    **options: Any,  # noqa: ANN401
) -> Stages:
    """Return this rank's stages of the model; all ranks call this together.

    Args:
        num_sequences: of one data-parallel rank in one step, `shape.length` tokens each.
        seed: of the initial weights, which do not depend on the layout.
        balance: weight of the mean balance loss.
        options: further arguments of the MoE layers.

    Raises:
        InputError: the layout cannot run the model; the message names sizes that can.
    """
    layout, layer = ranks.layout, shape.moe
    check_layout(
        layout, world_size=ranks.mesh.size(), num_blocks=shape.num_layers,
        num_heads=shape.num_heads, d_hidden=layer.d_hidden, num_experts=layer.num_experts,
        vocab_size=shape.vocab_size, stages_per_rank=stages_per_rank,
    )  # fmt: skip
    num_layers = sum(map(shape.has_experts, range(shape.num_layers)))
    blocks = stage_blocks(shape.num_layers, num_stages=layout.pp * stages_per_rank)
    parts = [
        LanguageModel(
            shape, lambda: ranks.expert_layer(layer, **options), blocks=blocks[stage],
            communicator=ranks.tensor_communicator,
            balance=balance / max(1, num_layers * num_micro_batches * layout.dp),
        ).to(ranks.mesh.device_type, dtype)
        for stage in ranks.stages(stages_per_rank)
    ]  # fmt: skip
    for part in parts:
        part.reset_parameters(seed)
    communicator, size = ranks.tensor_communicator, (num_sequences, shape.length)
    shapes = Shapes(
        inputs=torch.empty(size, dtype=torch.int64, device="meta"),
        between=torch.empty((*size, layer.d_model), dtype=dtype, device="meta"),
        outputs=torch.empty(
            (*size, len(vocab_range(shape.vocab_size, communicator))), dtype=dtype, device="meta"
        ),
    )

    def loss_of(logits_BSW: torch.Tensor, wanted_BS: torch.Tensor) -> torch.Tensor:
        return vocab_parallel_cross_entropy(
            logits_BSW.flatten(0, 1),
            wanted_BS.flatten(),
            vocab_size=shape.vocab_size,
            communicator=communicator,
        )

    return Stages(parts, ranks, loss_of=loss_of, shapes=shapes, num_micro_batches=num_micro_batches)
