"""Blocks whose router's weights multiply the experts' inputs: Llama 4's.

transformers gives every expert all tokens there, those that did not choose it with zeros. Here a
chosen pair of a token and an expert is a token of its own, which takes one expert with weight 1.
Where each token has one, as in the published models, the shared expert runs while they travel.

T tokens, K choices, D model width.
"""

from functools import partial
from typing import Any

import torch


def weigh_inputs(
    block: Any,  # noqa: ANN401 - a module of transformers
    hidden_states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the block's own forward returns: its output (T, D), and the router's logits."""
    x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores_TE, logits_TE = block.router(x_TD)
    # Experts that were not chosen have the score 0.
    scores_TK, experts_TK = scores_TE.topk(block.router.top_k, dim=1)
    rows_TKD = x_TD.unsqueeze(1) * scores_TK.unsqueeze(2)
    routed = partial(
        block.experts, rows_TKD.flatten(0, 1), experts_TK.reshape(-1, 1),
        torch.ones_like(scores_TK).view(-1, 1),
    )  # fmt: skip
    if scores_TK.shape[1] == 1 and not torch.compiler.is_compiling():
        return routed(partial(block.shared_expert, x_TD)), logits_TE
    y_TD = block.shared_expert(x_TD)
    return y_TD + routed().view_as(rows_TKD).sum(dim=1), logits_TE
