"""A small net with experts, and what one process makes of the batches of all ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import moetune
from moetune.comm.group import OneRank
from moetune.runtime.moe.layer import ExpertLayer, MoELayer

WIDTH, HIDDEN, TOKENS = 8, 16, 6
EXACT = 1e-11
WHOLE = StateDictOptions(full_state_dict=True)


class Net(nn.Module):
    """A dense layer, experts, and a dense layer."""

    def __init__(self, seed: int = 11, layer: type[ExpertLayer] = MoELayer, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(seed)
        arguments: dict[str, Any] = {
            "dtype": torch.float64,
            "pipeline": 3,
            "num_experts": 4,
            "top_k": 2,
        } | options
        kind: dict[str, Any] = {"dtype": arguments["dtype"], "device": arguments.get("device")}
        self.before = nn.Linear(WIDTH, WIDTH, **kind)
        self.moe = layer(WIDTH, HIDDEN, **arguments)
        self.after = nn.Linear(WIDTH, 1, **kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.after(x + self.moe(torch.tanh(self.before(x))))
        return result


def alone(**options: Any) -> Net:
    """Return a net whose experts are all in this process, though it is one of several ranks."""
    return Net(communicator=OneRank(), **options)


def batch(index: int) -> torch.Tensor:
    """One rank's tokens of one micro-batch."""
    generator = torch.Generator().manual_seed(50 + index)
    return torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64)


def share_of(batches: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return this rank's part of the global batch, which the number of ranks divides."""
    rank, num_ranks = 0, 1
    if dist.is_initialized():
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
    share = len(batches) // num_ranks
    return batches[rank * share : (rank + 1) * share]


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = net(x.to(next(net.parameters()).dtype))
    return y.square().mean()


def adam(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.05, eps=1e-4, **options)


def backward(net: nn.Module, batches: Sequence[torch.Tensor]) -> None:
    """Compute the gradients of the mean loss of micro-batches."""
    for x in batches:
        (loss_of(net, x) / len(batches)).backward()


def train(
    net: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[torch.Tensor], steps: int
) -> None:
    for _ in range(steps):
        backward(net, batches)
        optimizer.step()
        optimizer.zero_grad()


def trained_alone(steps: int, **options: Any) -> Net:
    """Return the net after steps in this process alone, on the batches of all ranks."""
    net = alone(**options)
    train(net, adam(net), [batch(index) for index in range(dist.get_world_size())], steps)
    return net


def sharded(net: Net, mesh: DeviceMesh, **options: Any) -> Net:
    """Shard a net with FSDP2, the layer of experts by itself."""
    moetune.prepare_fsdp(moetune.prepare_fsdp(net, mesh, **options), mesh)
    for module in (net.before, net.moe, net):
        fully_shard(module, mesh=mesh, **options)
    return net


def whole_state(net: nn.Module) -> dict[str, torch.Tensor]:
    """Return all ranks' parameters, on every rank."""
    state: dict[str, Any] = get_model_state_dict(net, options=WHOLE)
    return state


def check_equal(
    actual: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], tolerance: float = EXACT
) -> None:
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        assert actual[name].shape == value.shape, name
        error = float((actual[name] - value).norm() / value.norm())
        assert error <= tolerance, f"{name} differs by {error}"
