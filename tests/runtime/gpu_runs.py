"""Steps of layers and models on fake GPUs, and ranks of them one after another."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import moetune
from moetune.domain.constraints import Strategy
from moetune.domain.plan import Decision
from moetune.runtime.moe.layer import ExpertLayer, MoELayer, TensorExpertLayer
from tests.cuda_kit import FakeCuda, MirrorWorld, check_orders

GPU = torch.device("cuda", 1)
STRATEGIES: tuple[Strategy, ...] = ("none", "S1", "S2", "S3", "S4")
BOTH: Mapping[str, str] = {"cpu": "gloo", "cuda": "nccl"}
NCCL: Mapping[str, str] = {"cuda": "nccl"}


def on_every_rank(
    program: Callable[[FakeCuda], None], *, num_ranks: int = 2, **world: Any
) -> list[FakeCuda]:
    """Run a program on each rank's own fake GPUs, and compare what the ranks issued."""
    machines, logs = [], []
    for rank in range(num_ranks):
        torch.manual_seed(0)
        with FakeCuda() as cuda, MirrorWorld(cuda, rank=rank, num_ranks=num_ranks, **world) as one:
            program(cuda)
        machines.append(cuda)
        logs.append(one.log)
    check_orders(logs)
    return machines


def decision(strategy: Strategy = "none", degree: int = 4) -> Decision:
    return Decision(forward_degree=degree, backward_degree=degree, strategy=strategy)


def step(layer: ExpertLayer, device: torch.device = GPU, num_tokens: int = 24) -> None:
    """Run forward and backward once, and let the next step's memory come from this one's."""
    x = torch.randn(num_tokens, layer.shape.d_model, device=device, requires_grad=True)
    (layer(x).sum() + 0.1 * layer.aux_loss).backward()
    layer.zero_grad()


def moe_layer(device: torch.device | None = GPU, **options: Any) -> MoELayer:
    return MoELayer(8, 16, 4, 2, device=device, **options)


def tensor_layer(*, sequence_parallel: bool) -> TensorExpertLayer:
    return TensorExpertLayer(8, 16, 4, 2, device=GPU, sequence_parallel=sequence_parallel)


class Model(nn.Module):
    """Four dense layers and one of experts.

    Args:
        is_reversed: the dense layers run in another order than they are registered in.
    """

    def __init__(self, width: int = 16, *, is_reversed: bool = False) -> None:
        super().__init__()
        self.is_reversed = is_reversed
        self.dense = nn.ModuleList([nn.Linear(width, width) for _ in range(4)])
        self.experts = MoELayer(width, width, 4, 2, pipeline=3, memory_reuse="S1")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.dense) if self.is_reversed else self.dense:
            x = torch.relu(layer(x))
        y: torch.Tensor = self.experts(x)
        return y


def train_sharded(*, dtype: torch.dtype, offload: bool, num_steps: int = 3, **options: Any) -> None:
    """Train a model in chunks, of which the cache holds six."""
    model = Model().to(GPU, dtype)
    _, optimizer = moetune.shard(
        model, torch.optim.AdamW(model.parameters()), chunk_bytes=4200, cache_bytes=30000,
        offload=offload, **options,
    )  # fmt: skip
    for _ in range(num_steps):
        model(torch.randn(24, 16, device=GPU, dtype=dtype)).sum().backward()
        optimizer.clip_grad_norm_(1.0)  # type: ignore[attr-defined] # of shard's optimizer
        optimizer.step()
        optimizer.zero_grad()


def experts_say(value: Any, mine: int, other: int) -> Any:  # noqa: ARG001 - as the world calls it
    """Return what another rank says of its experts, where this one says that its own are `mine`."""
    is_listing = isinstance(value, dict) and any(name.startswith("experts.") for name in value)
    return dict.fromkeys(value, other) if is_listing else value
