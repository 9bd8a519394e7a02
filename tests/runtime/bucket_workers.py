"""What ranks do in the tests of buckets: train, and look at what they must not see."""

import copy
import itertools
import pickle
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from moetune.domain import buckets
from moetune.domain.errors import InputError
from moetune.domain.training import FoldedLayout, ZeroStage
from moetune.runtime.parallel.groups import join
from moetune.runtime.parallel.stages import Shapes, Stages

WIDTH, BATCH, STEPS = 6, 4, 3
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


class ReadsAhead(Net):
    """Reads a block's weight before the block runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.blocks[2].weight
        assert isinstance(weight, torch.Tensor)
        return super().forward(x + weight.sum())


class RunsAgain(Net):
    """Adds to a weight's gradient twice in a backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        block, inner = self.blocks[0], super().forward(x)
        for _ in range(2):
            inner = inner + checkpoint(block, inner, use_reentrant=True)
        return inner


def stages_of(net: nn.Module, *, zero: ZeroStage, least_bytes: int = 1) -> Stages:
    buckets.LEAST_BUCKET_BYTES = least_bytes
    torch.manual_seed(7)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    layout = FoldedLayout(dp=dist.get_world_size(), micro_batch=2, zero=zero)
    rows = torch.empty(BATCH, WIDTH, dtype=torch.float64, device="meta")
    return Stages(
        [net.double()], join(layout), loss_of=_loss_of,
        shapes=Shapes(inputs=rows, between=rows, outputs=rows),
    )  # fmt: skip


def _loss_of(outputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (outputs - wanted).square().mean()


def rows_of(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.9)


def _in_call(used: Callable[[int], bool], call: int, _: int) -> bool:
    return used(call)


def alone(net: nn.Module, used: Sequence[Callable[[int], bool]]) -> nn.Module:
    """Train as one process, with all ranks' micro-batches one after the other."""
    torch.manual_seed(7)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    net.double()
    optimizer, num_ranks = sgd([*net.parameters()]), dist.get_world_size()
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(num_ranks):
            for part, x in enumerate(rows_of(step, rank).chunk(BATCH // 2)):
                if isinstance(net, Net) and used:
                    net.used = partial(_in_call, used[rank], step * 2 + part)
                (_loss_of(net(x), x) / (num_ranks * BATCH // 2)).backward()
        optimizer.step()
    return net


def assert_trains_alike(
    make: Callable[[], nn.Module],
    *,
    zero: ZeroStage,
    used: Sequence[Callable[[int], bool]] = (),
) -> None:
    net, rank = make(), dist.get_rank()
    if isinstance(net, Net) and used:
        net.used = used[rank]
    stages = stages_of(net, zero=zero)
    optimizer = stages.optimizer(sgd)
    for step in range(STEPS):
        x = rows_of(step, rank)
        stages.backward(x, x)
        optimizer.step()
    wanted = dict(alone(make(), used).named_parameters())
    for name, parameter in stages.parts[0].named_parameters():
        assert float((parameter - wanted[name]).detach().abs().max()) < SAME, name


def values_are_whole_or_show(zero: ZeroStage) -> None:
    """A parameter that was held is NaN until something looks at its module."""
    net = Net()
    stages = stages_of(net, zero=zero)
    optimizer = stages.optimizer(sgd)
    held = [*net.parameters()]
    x = rows_of(0, dist.get_rank())
    looks: tuple[Callable[[], object], ...] = (
        lambda: net.first.weight, net.state_dict, lambda: copy.deepcopy(net), lambda: net(x),
        lambda: [*net.parameters()], optimizer.step, lambda: stages.backward(x, x),
        lambda: pickle.dumps(net.blocks), lambda: net.first._parameters["weight"],
        lambda: net.first._parameters.get("weight"), lambda: [*net.first._parameters.values()],
    )  # fmt: skip
    for look in looks:
        stages.backward(x, x)
        before = held[0].detach().clone()
        optimizer.step()
        assert bool(held[0].isnan().all()) == (zero > 0)
        if zero:
            with pytest.raises(RuntimeError, match="single memory location"):
                held[0].detach().add_(1)
        look()
        assert net.first.weight is held[0]
        assert bool((held[0] != before).any())
        assert bool(held[0].isfinite().all())
        told = [torch.empty_like(held[0]) for _ in range(dist.get_world_size())]
        dist.all_gather(told, held[0].detach())
        assert all(bool((one == told[0]).all()) for one in told)
    assert type(copy.deepcopy(net).first._parameters) is dict
    assert type(pickle.loads(pickle.dumps(net.first))._parameters) is dict  # noqa: S301 - made in this line


def unused_parameters_hold_nothing_up(zero: ZeroStage) -> None:
    """A rank that leaves a block out, always or in its last micro-batch, has the right sums."""
    for used in (
        [lambda _: True, lambda _: False],
        [lambda call: call % 2 == 0, lambda _: True],
    ):
        assert_trains_alike(Net, zero=zero, used=used)


def a_block_that_is_read_elsewhere_trains_alike(zero: ZeroStage) -> None:
    assert_trains_alike(ReadsAhead, zero=zero)


def a_gradient_behind_its_sum_is_refused() -> None:
    stages = stages_of(RunsAgain(), zero=0)
    x = rows_of(0, dist.get_rank())
    with pytest.raises(InputError, match="use_reentrant=False"):
        stages.backward(x, x)


def a_step_behind_a_failed_one_has_its_own_sums() -> None:
    def fail(_: torch.Tensor) -> None:
        raise InputError("this backward pass fails on all ranks")

    net, rank = Net(), dist.get_rank()
    stages = stages_of(net, zero=1)
    handle = net.first.weight.register_hook(fail)
    x = rows_of(5, rank)
    with pytest.raises(InputError, match="fails on all ranks"):
        stages.backward(x, x)
    handle.remove()
    optimizer = stages.optimizer(sgd)
    for step in range(STEPS):
        x = rows_of(step, rank)
        stages.backward(x, x)
        optimizer.step()
    wanted = dict(alone(Net(), ()).named_parameters())
    for name, parameter in stages.parts[0].named_parameters():
        assert float((parameter - wanted[name]).detach().abs().max()) < SAME, name
