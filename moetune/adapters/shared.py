"""Blocks of transformers whose shared experts run while the rows of the routed ones travel.

A block calls its shared experts before or behind its experts. Here it gives them to the layer,
which runs them in between: the same modules, with the same numbers. A block is taken whose class
computes what is written here, statement by statement; any other keeps its own order.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from moetune.runtime.plans.book import warn_on_first

BlockForward = Callable[[Any, torch.Tensor], torch.Tensor]
_SUM = """
residuals = hidden_states
orig_shape = hidden_states.shape
_, topk_weights, topk_indices = self.gate(hidden_states)
hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
hidden_states = self.experts(hidden_states, topk_indices, topk_weights).view(*orig_shape)
hidden_states = hidden_states + self.shared_experts(residuals)
return hidden_states
"""
"""DeepSeek-V2 and V3, GLM-4-MoE."""
_GATED = """
batch_size, sequence_length, hidden_dim = hidden_states.shape
hidden_states_reshaped = hidden_states.view(-1, hidden_dim)
shared_expert_output = self.shared_expert(hidden_states_reshaped)
_, routing_weights, selected_experts = self.gate(hidden_states_reshaped)
expert_output = self.experts(hidden_states_reshaped, selected_experts, routing_weights)
shared_expert_output = (
    F.sigmoid(self.shared_expert_gate(hidden_states_reshaped)) * shared_expert_output
)
expert_output = expert_output + shared_expert_output
expert_output = expert_output.reshape(batch_size, sequence_length, hidden_dim)
return expert_output
"""
"""Qwen2-MoE and Qwen3-Next."""


def add_shared(block: Any, hidden_states: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - a module of transformers
    """Return a block's output: that of its experts and that of its shared experts."""
    if torch.compiler.is_compiling():  # which sees no more of the layer than its results
        return _own(block, hidden_states)
    _, weights, chosen = block.gate(hidden_states)
    x_TD = hidden_states.view(-1, hidden_states.shape[-1])

    def shared() -> torch.Tensor:
        result: torch.Tensor = block.shared_experts(hidden_states)
        return result.view(x_TD.shape)

    y_TD: torch.Tensor = block.experts(x_TD, chosen, weights, shared)
    return y_TD.view(hidden_states.shape)


def add_gated(block: Any, hidden_states: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """Return a block's output: that of its experts and that of its shared expert, by its gate."""
    if torch.compiler.is_compiling():
        return _own(block, hidden_states)
    x_TD = hidden_states.view(-1, hidden_states.shape[-1])
    _, weights, chosen = block.gate(x_TD)

    def shared() -> torch.Tensor:
        result: torch.Tensor = block.shared_expert(x_TD)
        return functional.sigmoid(block.shared_expert_gate(x_TD)) * result

    y_TD: torch.Tensor = block.experts(x_TD, chosen, weights, shared)
    return y_TD.reshape(hidden_states.shape)


_KNOWN: tuple[tuple[str, BlockForward], ...] = ((_SUM, add_shared), (_GATED, add_gated))


def run_shared_beside(block: nn.Module, *, rank: int) -> None:
    """Let a block that has shared experts give them to the layer.

    Args:
        rank: the first one is told of a class that computes otherwise than it did.
    """
    children = {name for name, _ in block.named_children()}
    if not children & {"shared_expert", "shared_experts"}:
        return
    statements = _statements(block)
    for text, forward in _KNOWN:
        if statements == _spelled(ast.parse(text).body):
            block.forward = partial(forward, block)
            return
    warn_on_first(
        f"{type(block).__name__} computes in an order of its own: its shared experts are not run "
        "beside the exchanges of its experts. Results are the same.",
        rank=rank,
    )


def _own(block: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = type(block).forward(block, hidden_states)
    return result


def _statements(block: nn.Module) -> str:
    """Return what a block's class computes; "" where nobody knows, or another took its place."""
    forward = type(block).forward
    if "forward" in vars(block) or hasattr(forward, "__wrapped__"):
        return ""
    try:
        [function] = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    except (OSError, TypeError, SyntaxError):  # no source is installed, or it is not Python's
        return ""
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return ""
    return _spelled(function.body)


def _spelled(statements: list[ast.stmt]) -> str:
    """Return statements without layout and comments."""
    return "\n".join(map(ast.unparse, statements))
