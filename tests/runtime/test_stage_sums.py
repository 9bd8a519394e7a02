"""Stages' sums over replicas, with and without ZeRO, end where one process ends."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moetune.domain.errors import InputError
from moetune.domain.training import FoldedLayout, ZeroStage
from moetune.runtime.parallel.groups import join
from moetune.runtime.parallel.optimizer import local_grad
from moetune.runtime.parallel.stages import Shapes, Stages
from tests.ranks import run_ranks

WIDTH, BATCH, STEPS = 6, 4, 3
ZERO: tuple[ZeroStage, ...] = (0, 1, 3)
SAME = 1e-12
RATE = 0.1


class Net(nn.Module):
    """Linear blocks between two others; what `used` says is left out on a rank."""

    def __init__(self, used: Callable[[int], bool] = lambda _: True) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.used, self.calls = used, itertools.count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        call, x = next(self.calls), torch.tanh(self.first(x))
        for number, block in enumerate(self.blocks):
            if number != 1 or self.used(call):
                x = x + torch.tanh(block(x))
        y: torch.Tensor = self.last(x)
        return y


def net_of(used: Callable[[int], bool] = lambda _: True) -> Net:
    torch.manual_seed(7)
    net = Net(used).double()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    return net


def stages_of(net: nn.Module, *, zero: ZeroStage) -> Stages:
    layout = FoldedLayout(dp=dist.get_world_size(), micro_batch=2, zero=zero)
    rows = torch.empty(BATCH, WIDTH, dtype=torch.float64, device="meta")
    shapes = Shapes(inputs=rows, between=rows, outputs=rows)
    return Stages([net], join(layout), loss_of=_loss_of, shapes=shapes)


def _loss_of(outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (outputs - wanted).square().mean()


def rows_of(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def alone(used: Sequence[Callable[[int], bool]] = ()) -> dict[str, torch.Tensor]:
    """Train as one process, with all ranks' micro-batches one after the other."""
    net, num_ranks = net_of(), dist.get_world_size()
    optimizer = sgd([*net.parameters()])
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(num_ranks):
            for part, x in enumerate(rows_of(step, rank).chunk(BATCH // 2)):
                if used:
                    net.used = partial(_in_call, used[rank], step * 2 + part)
                (_loss_of(net(x), x) / (num_ranks * BATCH // 2)).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def _in_call(used: Callable[[int], bool], call: int, _: int) -> bool:
    return used(call)


def _train(stages: Stages) -> None:
    optimizer = stages.optimizer(sgd)
    for step in range(STEPS):
        x = rows_of(step, dist.get_rank())
        stages.backward(x, x)
        optimizer.step()


def _assert_equal(stages: Stages, wanted: dict[str, torch.Tensor]) -> None:
    for name, parameter in stages.parts[0].named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        assert float((whole - wanted[name]).detach().abs().max()) < SAME, name


def unused_parameters_count_as_zeros() -> None:
    """A rank that leaves a block out, always or in its last micro-batch, has the right sums."""
    for used in ([lambda _: True, lambda _: False], [lambda call: call % 2 == 0, lambda _: True]):
        stages = stages_of(net_of(used[dist.get_rank()]), zero=0)
        _train(stages)
        _assert_equal(stages, alone(used))


def a_step_behind_a_failed_step_has_only_its_sums(zero: ZeroStage) -> None:
    def fail(_: torch.Tensor) -> None:
        raise InputError("this backward pass fails on all ranks")

    def fails(_: nn.Module, __: object, y: torch.Tensor) -> None:
        y.register_hook(fail)

    net = net_of()
    stages = stages_of(net, zero=zero)
    handle = net.blocks[0].register_forward_hook(fails)
    x = rows_of(5, dist.get_rank())
    with pytest.raises(InputError, match="fails on all ranks"):
        stages.backward(x, x)
    handle.remove()
    _train(stages)
    _assert_equal(stages, alone())


def sums_are_rounded_once() -> None:
    """Gradients 256 and, seven times, 0.5: a sum in bfloat16 that begins with 256 stays there."""
    num_ranks, x = dist.get_world_size(), torch.full((2, 1), 0.5, dtype=torch.bfloat16)
    if dist.get_rank() == 0:
        x[0] = 256
    for zero in ZERO:
        part = nn.Linear(1, 64, bias=False, dtype=torch.bfloat16)
        shapes = Shapes(inputs=x.to("meta"), between=x.to("meta"), outputs=part(x).to("meta"))
        stages = Stages(
            [part], join(FoldedLayout(dp=num_ranks, micro_batch=1, zero=zero)), shapes=shapes,
            loss_of=lambda outputs, _: outputs.sum() * 2 * num_ranks,
        )  # fmt: skip
        stages.backward(x, x)
        grad = local_grad(part.weight)
        assert grad is not None
        assert grad.bfloat16().unique().tolist() == [260.0], (zero, grad)


@pytest.mark.dist
def test_sums_of_gradients_in_bfloat16_are_rounded_once() -> None:
    assert run_ranks(sums_are_rounded_once, 4) == [""] * 4


@pytest.mark.dist
def test_a_rank_that_leaves_a_block_out_has_the_right_sums() -> None:
    assert run_ranks(unused_parameters_count_as_zeros, 2) == ["", ""]


@pytest.mark.dist
@pytest.mark.parametrize("zero", ZERO)
def test_a_step_behind_a_failed_step_has_only_its_sums(zero: ZeroStage) -> None:
    assert run_ranks(a_step_behind_a_failed_step_has_only_its_sums, 2, zero) == ["", ""]
