"""A model and two batches on a fake GPU, in turns or one after the other."""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

import moetune
from moetune.domain.constraints import Strategy
from moetune.runtime.moe.layer import MoELayer
from tests.runtime.gpu_runs import GPU, decision

WIDTH = 8
Losses = tuple[torch.Tensor, torch.Tensor]


def model_of(strategy: Strategy = "none", degrees: tuple[int, int] = (1, 1)) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(
        *(
            module
            for _ in range(2)
            for module in (nn.Linear(WIDTH, WIDTH), MoELayer(WIDTH, 16, 4, 2, dtype=torch.float64))
        ),
        nn.Linear(WIDTH, WIDTH),
    ).to(GPU, torch.float64)
    for layer in layers_of(model):
        layer.pin(decision(strategy, degrees))
    return model


def layers_of(model: nn.Module) -> list[MoELayer]:
    return [each for each in model.modules() if isinstance(each, MoELayer)]


def two_batches() -> list[torch.Tensor]:
    return [torch.randn(rows, WIDTH, dtype=torch.float64, device=GPU) for rows in (12, 9)]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = model(x)
    return y.square().mean() + 0.1 * sum(layer.aux_loss for layer in layers_of(model))


def in_turns(model: nn.Module) -> moetune.BatchOverlap[torch.Tensor]:
    return moetune.BatchOverlap[torch.Tensor](model, partial(loss_of, model))


def one_after_the_other(model: nn.Module) -> Callable[[Sequence[torch.Tensor]], Losses]:
    def step(batches: Sequence[torch.Tensor]) -> Losses:
        losses = []
        for number, x in enumerate(batches):
            is_last = number == len(batches) - 1
            with contextlib.nullcontext() if is_last else moetune.no_sync(model):
                losses.append(loss_of(model, x))
                losses[-1].backward()
        return losses[0].detach(), losses[1].detach()

    return step


def train(run: Callable[[Sequence[torch.Tensor]], Losses], model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        run(two_batches())
        optimizer.step()
