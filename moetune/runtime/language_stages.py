"""The language model cut into stages, as a layout says."""

from typing import Any

import torch

from moetune.domain.layout_check import check_layout, stage_blocks
from moetune.domain.transformer import Transformer
from moetune.runtime.language_model import LanguageModel
from moetune.runtime.ranks import Ranks
from moetune.runtime.stages import Shapes, Stages
from moetune.runtime.vocabulary import share_of, shared_cross_entropy


def staged_language_model(
    shape: Transformer,
    ranks: Ranks,
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
        seed: the first weights are a function of it alone, whatever the layout.
        balance: weight of the mean balance loss.
        options: further arguments of the MoE layers.

    Raises:
        InputError: the layout cannot run the model; the text names sizes that can.
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
            link=ranks.tensor_link,
            balance=balance / max(1, num_layers * num_micro_batches * layout.dp),
        ).to(ranks.mesh.device_type, dtype)
        for stage in ranks.stages(stages_per_rank)
    ]  # fmt: skip
    for part in parts:
        part.reset_parameters(seed)
    link, size = ranks.tensor_link, (num_sequences, shape.length)
    shapes = Shapes(
        inputs=torch.empty(size, dtype=torch.int64, device="meta"),
        between=torch.empty((*size, layer.d_model), dtype=dtype, device="meta"),
        outputs=torch.empty(
            (*size, len(share_of(shape.vocab_size, link))), dtype=dtype, device="meta"
        ),
    )

    def loss_of(logits_BSW: torch.Tensor, wanted_BS: torch.Tensor) -> torch.Tensor:
        return shared_cross_entropy(
            logits_BSW.flatten(0, 1), wanted_BS.flatten(), vocab_size=shape.vocab_size, link=link
        )

    return Stages(parts, ranks, loss_of=loss_of, shapes=shapes, num_micro_batches=num_micro_batches)
