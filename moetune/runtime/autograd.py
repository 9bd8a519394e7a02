"""Queries of the autograd engine that torch has no public name for."""

import torch


def is_in_backward() -> bool:
    """Return whether this thread is in a backward pass, as while a checkpoint computes again."""
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001 - torch has no public name
