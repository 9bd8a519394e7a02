"""What ranks do in the tests of what must not go wrong in layers without a word."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

import moetune
from tests.adapters.workers import raised, same_on_all

TOLERANCE = 1e-10


def rank_of() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def layer_of(*, num_experts: int = 8, top_k: int = 2) -> moetune.MoELayer:
    """Return a layer with equal parameters on every rank."""
    torch.manual_seed(0)
    return moetune.MoELayer(
        6, 5, num_experts, top_k, activation="swiglu", dtype=torch.float64
    )  # fmt: skip


def tokens_of(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(12 + rank, 6, generator=generator, dtype=torch.float64)


class Twice(nn.Module):
    """A parametrization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def parametrized_experts() -> None:
    layer = layer_of()
    register_parametrization(layer.experts, "w1", Twice())
    text = same_on_all(raised(lambda: layer(tokens_of(rank_of()[0]))))
    assert "w1 is computed from other parameters, as by LoRA" in text


def any_ranks(folder: str) -> None:
    """What is shown on any number of ranks, which are started once."""
    assert folder
    parametrized_experts()
