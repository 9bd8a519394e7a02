"""Gates that choose all experts alike on one batch, as plans assume."""

from collections.abc import Callable

import torch

from examples.language_model import LanguageModel
from moetune.comm.group import OneRank
from moetune.domain.model import Transformer
from moetune.runtime.moe.layer import MoELayer

Gates = dict[str, torch.Tensor]
"""`gate.weight` of every block with experts, by the block's name."""
_NUM_DRAWS = 32
_SMALLEST_SCALE = 1e-6


def balanced_gates(transformer: Transformer, text_BS: torch.Tensor, *, seed: int) -> Gates:
    """Return gates under which the tokens of that batch choose all experts about alike.

    A gate's rows are drawn at random where the tokens that reach it have no mean and vary in
    all directions alike, so that no expert is the first choice of more tokens than another.

    Args:
        text_BS: (B, S) tokens of the global batch.
        seed: of the model's weights and the gates.
    """
    moe = transformer.moe
    model = LanguageModel(
        transformer,
        lambda: MoELayer(
            moe.d_model, moe.d_hidden, moe.num_experts, moe.top_k, activation=moe.activation,
            pipeline=False, communicator=OneRank(),
        ),
    )  # fmt: skip
    model.reset_parameters(seed)
    gates: Gates = {}
    for number, (name, block) in enumerate(model.blocks.items()):
        if isinstance(block.ffn, MoELayer):
            generator = torch.Generator().manual_seed(seed + number)
            block.ffn.register_forward_pre_hook(_set_gate(name, gates, generator))
    with torch.no_grad():
        model(text_BS)
    return gates


def balanced_gate(
    x_TD: torch.Tensor,
    *,
    num_experts: int,
    top_k: int,
    generator: torch.Generator,
    smallest_scale: float = _SMALLEST_SCALE,
) -> torch.Tensor:
    """Return a gate (E, D), in float64, under which those tokens choose all experts about alike.

    Args:
        smallest_scale: least variance, over the largest, of directions that it looks at.
    """
    x_TD = x_TD.double()
    axes_DR = _white_axes(x_TD, smallest_scale)
    size = num_experts, axes_DR.shape[1]
    draws = [
        torch.randn(size, generator=generator, dtype=torch.float64) @ axes_DR.T
        for _ in range(_NUM_DRAWS)
    ]
    return min(draws, key=lambda gate_ED: rows_of_experts(x_TD @ gate_ED.T, top_k).max())


def rows_of_experts(logits_TE: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return how many tokens choose each expert (E)."""
    chosen = logits_TE.topk(top_k, dim=-1).indices
    return torch.bincount(chosen.flatten(), minlength=logits_TE.shape[1])


def _set_gate(
    name: str, gates: Gates, generator: torch.Generator
) -> Callable[[MoELayer, tuple[torch.Tensor]], None]:
    def hook(layer: MoELayer, inputs: tuple[torch.Tensor]) -> None:
        gate_ED = balanced_gate(
            inputs[0].flatten(0, -2), num_experts=layer.shape.num_experts,
            top_k=layer.shape.top_k, generator=generator,
        )  # fmt: skip
        layer.gate.weight.copy_(gate_ED)
        gates[name] = layer.gate.weight.detach().clone()

    return hook


def _white_axes(x_TD: torch.Tensor, smallest_scale: float) -> torch.Tensor:
    """Return directions (D, R) in which the tokens have no mean and vary alike."""
    mean_D = x_TD.mean(0)
    centred_TD = x_TD - mean_D
    scales_D, axes_DD = torch.linalg.eigh(centred_TD.T @ centred_TD / len(x_TD))
    usable = scales_D > scales_D[-1] * smallest_scale
    axes_DR = axes_DD[:, usable] / scales_D[usable].sqrt()
    unit_D = mean_D / mean_D.norm().clamp(min=_SMALLEST_SCALE)
    white_DR: torch.Tensor = axes_DR - torch.outer(unit_D, unit_D @ axes_DR)
    return white_DR
