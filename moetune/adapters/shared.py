"""Blocks of transformers whose shared experts run while the rows of the routed ones travel.

A block calls its shared experts before or behind its experts. Here it gives them to the layer,
which runs them in between: the same modules, with the same numbers. A block is taken whose class's
own statements were compared with what is written here, which is known by their digest; any other
keeps its own order.

T tokens, K choices, D model width.
"""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from moetune.runtime.plans.book import warn_on_first

BlockForward = Callable[[Any, torch.Tensor], torch.Tensor]


def add_shared(block: Any, hidden_states: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - a module of transformers
    """Return a block's output: that of its experts and that of its shared experts."""
    _, weights, chosen = block.gate(hidden_states)
    x_TD = hidden_states.view(-1, hidden_states.shape[-1])

    def shared() -> torch.Tensor:
        result: torch.Tensor = block.shared_experts(hidden_states)
        return result.view(x_TD.shape)

    y_TD: torch.Tensor = block.experts(x_TD, chosen, weights, shared)
    return y_TD.view(hidden_states.shape)


def add_gated(block: Any, hidden_states: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """Return a block's output: that of its experts and that of its shared expert, by its gate."""
    x_TD = hidden_states.view(-1, hidden_states.shape[-1])
    _, weights, chosen = block.gate(x_TD)

    def shared() -> torch.Tensor:
        result: torch.Tensor = block.shared_expert(x_TD)
        return functional.sigmoid(block.shared_expert_gate(x_TD)) * result

    y_TD: torch.Tensor = block.experts(x_TD, chosen, weights, shared)
    return y_TD.reshape(hidden_states.shape)


_KNOWN: Mapping[str, BlockForward] = MappingProxyType({
    "d0c879166c9d5177": add_shared,  # DeepSeek-V2 and V3, GLM-4-MoE of transformers 5.24
    "64900aacce01346d": add_gated,  # Qwen2-MoE and Qwen3-Next
})  # fmt: skip
"""By the digest of a block's statements."""


def run_shared_beside(block: nn.Module, *, rank: int) -> None:
    """Let a block that has shared experts give them to the layer.

    Args:
        rank: the first one is told of a class that computes otherwise than it did.
    """
    children = {name for name, _ in block.named_children()}
    if not children & {"shared_expert", "shared_experts"}:
        return
    forward = _KNOWN.get(_digest(block))
    if forward is not None:
        block.forward = partial(forward, block)
        return
    warn_on_first(
        f"{type(block).__name__} computes in an order of its own: its shared experts are not run "
        "beside the exchanges of its experts. Results are the same.",
        rank=rank,
    )


def _digest(block: nn.Module) -> str:
    """Return the digest of what a block's class computes, without layout and comments.

    Returns:
        "" where nobody knows, or another function took its place.
    """
    forward = type(block).forward
    if "forward" in vars(block) or hasattr(forward, "__wrapped__"):
        return ""
    try:
        [function] = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    except (OSError, TypeError, SyntaxError):  # no source is installed, or it is not Python's
        return ""
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return ""
    statements = "\n".join(map(ast.unparse, function.body))
    return hashlib.sha256(statements.encode()).hexdigest()[:16]


def weigh_inputs(
    block: Any,  # noqa: ANN401 - a module of transformers
    hidden_states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what Llama 4's block returns: its output (T, D), and the router's logits.

    Its router's weights multiply the experts' inputs, and transformers gives every expert all
    tokens. Here a chosen pair of a token and an expert is a token, which takes one expert with
    weight 1. With one choice a token the shared expert runs while they travel.
    """
    x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores_TE, logits_TE = block.router(x_TD)
    # Experts that were not chosen have the score 0.
    scores_TK, experts_TK = scores_TE.topk(block.router.top_k, dim=1)
    rows_TKD = x_TD.unsqueeze(1) * scores_TK.unsqueeze(2)
    routed = partial(
        block.experts, rows_TKD.flatten(0, 1), experts_TK.reshape(-1, 1),
        torch.ones_like(scores_TK).view(-1, 1),
    )  # fmt: skip
    if scores_TK.shape[1] == 1:
        return routed(partial(block.shared_expert, x_TD)), logits_TE
    y_TD = block.shared_expert(x_TD)
    return y_TD + routed().view_as(rows_TKD).sum(dim=1), logits_TE
