"""Grouped kernels on a CPU: torch's own, and one by its definition that also takes float64."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from moetune.runtime.moe import expert_kernels
from tests.runtime import workers


def grouped_mm(x: torch.Tensor, w: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """Multiply group by group; groups are rows of `x`, or columns where `w` has no groups."""
    ends = offs.tolist()
    pairs = list(zip([0, *ends], ends, strict=False))
    if w.dim() == x.dim():
        parts = [x[:, low:high] @ w[low:high] for low, high in pairs]
        # A kernel may write nothing where it adds nothing up.
        fill = [torch.full_like(part, torch.nan) for part in parts]
        return torch.stack([
            part if high > low else empty
            for part, empty, (low, high) in zip(parts, fill, pairs, strict=True)
        ])  # fmt: skip
    return torch.cat([x[low:high] @ w[group] for group, (low, high) in enumerate(pairs)])


@contextmanager
def grouped(kernel: object = grouped_mm) -> Iterator[None]:
    """Let layers take grouped kernels on any device and in any dtype."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_kernels, "has_grouped", lambda *_: True)
        patch.setattr(torch, "_grouped_mm", kernel)
        yield


def dense_matrix(activations: Sequence[str], degrees: Sequence[int]) -> None:
    """Every degree, top_k and capacity with grouped kernels, all activations kept."""
    with grouped():
        workers.dense_matrix(activations, degrees)


def reuse_matrix(activations: Sequence[str], degrees: Sequence[int]) -> None:
    """The same with memory reused."""
    with grouped():
        workers.reuse_matrix(activations, degrees)
