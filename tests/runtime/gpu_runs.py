"""Steps of layers and models on fake GPUs, and ranks of them one after another."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

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
        with FakeCuda() as cuda, MirrorWorld(cuda, rank=rank, num_ranks=num_ranks, **world) as net:
            program(cuda)
        machines.append(cuda)
        logs.append(net.log)
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


def tensor_layer() -> TensorExpertLayer:
    return TensorExpertLayer(8, 16, 4, 2, device=GPU)
