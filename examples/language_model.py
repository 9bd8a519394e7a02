"""A small language model with experts, on one rank or cut by a layout into stages and shards.

B sequences, S tokens each, D model width, V tokens of the vocabulary.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from moetune.domain.model import Transformer
from moetune.domain.rules import check_layout
from moetune.domain.training import TrainingJob
from moetune.huggingface.registry import paper_decoder
from moetune.runtime.moe.layer import ExpertLayer
from moetune.runtime.parallel.groups import ParallelGroups
from moetune.runtime.parallel.stages import Shapes, Stages
from moetune.runtime.parallel.whole_model import with_loss


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModules:
    """The modules of one stage.

    Args:
        blocks: numbers of its blocks; all stages together have each once.
        is_first, is_last: whether it has the embedding, and norm and head.
    """

    blocks: range
    is_first: bool
    is_last: bool


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


class LanguageModel(nn.Module):
    """Next-token model: all blocks, or those of one stage.

    Parameters have the same names under every layout.

    Args:
        make_moe: returns an MoE layer; called once for every block with experts.
        stage: modules of this stage; None for all.
        balance: weight of every layer's balance loss in the gradients.
        recompute: whether blocks are computed again in the backward pass.
    """

    def __init__(
        self,
        shape: Transformer,
        make_moe: Callable[[], ExpertLayer],
        *,
        stage: StageModules | None = None,
        balance: float = 0.0,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        if stage is None:
            stage = StageModules(blocks=range(shape.num_layers), is_first=True, is_last=True)
        d_model, d_hidden = shape.moe.d_model, shape.moe.d_hidden
        self.is_first, self.is_last, self.recompute = stage.is_first, stage.is_last, recompute
        if self.is_first:
            self.tokens = nn.Embedding(shape.vocab_size, d_model)
            self.places = nn.Embedding(shape.length, d_model)
        self.blocks = nn.ModuleDict()
        for block in stage.blocks:
            ffn = make_moe() if shape.has_experts(block) else FeedForward(d_model, d_hidden)
            attention = Attention(d_model, shape.num_heads)
            self.blocks[str(block)] = TransformerBlock(attention, ffn, d_model, balance)
        if self.is_last:
            self.norm = nn.LayerNorm(d_model)
            self.head = nn.Linear(d_model, shape.vocab_size)

    def reset_parameters(self, seed: int) -> None:
        """Draw every layer from the seed and its name: the same values under every layout."""
        for name, module in self.named_modules():
            if module is not self and hasattr(module, "reset_parameters"):
                with torch.random.fork_rng(devices=()):
                    torch.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
                    module.reset_parameters()

    def forward(self, x: torch.Tensor, first_place: int = 0) -> torch.Tensor:
        """Return the logits of the next tokens, or (B, S, D) for the next stage.

        Args:
            x: (B, S) tokens as int64, or (B, S, D) of the previous stage.
            first_place: of these tokens in their sequences, for the last positions of a batch.
        """
        if self.is_first:
            places = torch.arange(first_place, first_place + x.shape[1], device=x.device)
            x = self.tokens(x) + self.places(places)
        for block in self.blocks.values():
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x)) if self.is_last else x


def cut_dense_parts(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Cut all but norms and experts over a tensor-parallel group, by torch's own styles."""
    for block in model.blocks.values():
        parts = {"attention.qkv": ColwiseParallel(), "attention.out": RowwiseParallel()}
        if isinstance(block.ffn, FeedForward):
            parts |= {"ffn.up": ColwiseParallel(), "ffn.down": RowwiseParallel()}
        parallelize_module(block, mesh, parts)
    whole = Replicate()
    if model.is_first:
        rows = RowwiseParallel(input_layouts=whole, output_layouts=whole)
        parallelize_module(model, mesh, {"tokens": rows})
    if model.is_last:
        parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=whole)})


def next_token_loss(logits_BSV: torch.Tensor, wanted_BS: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the next tokens, in nats."""
    return functional.cross_entropy(logits_BSV.flatten(0, 1), wanted_BS.flatten())


def staged_language_model(
    shape: Transformer,
    ranks: ParallelGroups,
    *,
    num_sequences: int,
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
    stages = _stage_modules(shape, ranks, num_sequences)
    num_micro_batches = num_sequences // layout.micro_batch
    losses = max(1, shape.num_moe_layers * num_micro_batches) * layout.dp
    parts = [
        LanguageModel(
            shape, lambda: ranks.expert_layer(layer, **options), stage=stages[stage],
            balance=balance / losses,
            recompute="full" in layout.recompute,
        ).to(ranks.mesh.device_type, dtype)
        for stage in ranks.stages()
    ]  # fmt: skip
    for part in parts:
        part.reset_parameters(seed)
        if layout.tp > 1:
            cut_dense_parts(part, ranks.mesh["tp"])
    size = num_sequences, shape.length
    shapes = Shapes(
        inputs=torch.empty(size, dtype=torch.int64, device="meta"),
        between=torch.empty((*size, layer.d_model), dtype=dtype, device="meta"),
        outputs=torch.empty((*size, shape.vocab_size), dtype=dtype, device="meta"),
    )
    return Stages(parts, ranks, loss_of=next_token_loss, shapes=shapes)


def _stage_modules(
    shape: Transformer, ranks: ParallelGroups, num_sequences: int
) -> list[StageModules]:
    """Return the modules of every stage; InputError where the layout cannot run the model."""
    layout = ranks.layout
    decoder = paper_decoder("language model", shape)
    job = TrainingJob(
        decoder=decoder, world_size=layout.world_size, global_batch=num_sequences * layout.dp,
        length=shape.length,
    )  # fmt: skip
    check_layout(layout, job)
    sizes = [word.count("t") for word in layout.stages_of(decoder)]
    last = len(sizes) - 1
    return [
        StageModules(blocks=range(end - size, end), is_first=number == 0, is_last=number == last)
        for number, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True))
    ]
