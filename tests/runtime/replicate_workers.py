"""What ranks do in the tests of `moetune.replicate`."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import moetune
from moetune.comm.group import OneRank
from moetune.domain.errors import InputError, RankMismatchError
from moetune.domain.gradients import GradientPiece, GradientSchedule
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.parallel.senders import ThreadSender
from moetune.runtime.trace import HostRecorder
from tests.runtime.companion_nets import HIDDEN, WIDTH, batch, check_equal

STEPS = 3
DEGREES = (1, 4)
SPLIT = GradientSchedule(
    pieces=(
        GradientPiece(phase=-1, chunk=None, end_bytes=40),  # within a weight, and an element
        GradientPiece(phase=0, chunk=0, end_bytes=72),
        GradientPiece(phase=0, chunk=2, end_bytes=75),
        GradientPiece(phase=0, chunk=None, end_bytes=500),
        GradientPiece(phase=1, chunk=0, end_bytes=700),
        GradientPiece(phase=1, chunk=None, end_bytes=10**6),
    )
)


class Deep(nn.Module):
    """Two layers of experts between dense ones: one is used twice, one frozen, one never used."""

    def __init__(self, degree: int, *, is_alone: bool = False, seed: int = 11) -> None:
        super().__init__()
        torch.manual_seed(seed)
        kind: dict[str, Any] = {"dtype": torch.float64}
        options = kind | {"pipeline": degree} | ({"communicator": OneRank()} if is_alone else {})
        self.shared = nn.Linear(WIDTH, WIDTH, **kind)
        self.frozen = nn.Linear(WIDTH, WIDTH, **kind).requires_grad_(requires_grad=False)
        self.moes = nn.ModuleList(MoELayer(WIDTH, HIDDEN, 6, 2, **options) for _ in range(2))
        self.between = nn.Linear(WIDTH, WIDTH, **kind)
        self.unused = nn.Linear(WIDTH, 1, **kind)
        self.sometimes = nn.Linear(WIDTH, WIDTH, **kind)
        self.norm = nn.LayerNorm(WIDTH, **kind)
        self.after = nn.Linear(WIDTH, 1, **kind)

    def forward(self, x: torch.Tensor, *, is_used: bool = True) -> torch.Tensor:
        x = self.frozen(torch.tanh(self.shared(x)))
        x = x + self.moes[0](x)
        x = torch.tanh(self.between(x))
        x = x + self.sometimes(x) if is_used else x
        x = x + self.moes[1](self.shared(x))
        y: torch.Tensor = self.after(self.norm(x))
        return y


def loss_of(net: nn.Module, x: torch.Tensor, *, is_used: bool = True) -> torch.Tensor:
    y: torch.Tensor = net(x, is_used=is_used)
    return y.square().mean()


def expected(num: int = 1, used: Callable[[int], bool] = lambda _: True) -> dict[str, torch.Tensor]:
    """The gradients of one process on every rank's micro-batches; zeros of unused parameters."""
    net, world = Deep(1, is_alone=True), dist.get_world_size()
    for index in range(num * world):
        (loss_of(net, batch(index), is_used=used(index // num)) / (num * world)).backward()
    return {
        name: torch.zeros_like(each) if each.grad is None else each.grad
        for name, each in net.named_parameters()
        if each.requires_grad
    }


def check_gradients(net: nn.Module, wanted: dict[str, torch.Tensor], scale: float = 1) -> None:
    for name, parameter in net.named_parameters():
        if name not in wanted:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        whole = wanted[name]
        if ".experts." in name:
            whole = whole.chunk(dist.get_world_size())[dist.get_rank()]
        error = float((parameter.grad * scale - whole).norm())
        assert error <= 1e-11 * max(1.0, float(whole.norm())), f"{name} differs by {error}"


def mine(num: int = 1) -> list[torch.Tensor]:
    return [batch(dist.get_rank() * num + index) for index in range(num)]


@contextmanager
def counted_pieces() -> Iterator[list[int]]:
    """Elements of each piece that was sent, in order."""
    sent, honest = list[int](), ThreadSender.start

    def start(self: ThreadSender, parts: list[torch.Tensor], behind: Any) -> None:
        sent.append(sum(part.numel() for part in parts))
        honest(self, parts, behind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadSender, "start", start)
        yield sent


def equals_one_process() -> None:
    wanted = expected()
    for degree, schedule in itertools.product(DEGREES, (None, SPLIT, GradientSchedule())):
        net = moetune.replicate(Deep(degree, seed=11 + dist.get_rank()), schedule)
        with torch.no_grad():
            # Replicas have the first rank's values, and experts their own layers'.
            alone = Deep(1, is_alone=True)
            for name, value in alone.named_parameters():
                if ".experts." not in name:
                    dict(net.named_parameters())[name].copy_(value)
        for _ in range(STEPS):
            for is_none in (True, False):
                net.zero_grad(set_to_none=is_none)
                loss_of(net, mine()[0]).backward()
                check_gradients(net, wanted)


def equals_ddp() -> None:
    for degree in DEGREES:
        ours, theirs = moetune.replicate(Deep(degree)), Deep(degree)
        wrapped = DistributedDataParallel(moetune.prepare_ddp(theirs), find_unused_parameters=True)
        for one, net in ((ours, ours), (wrapped, theirs)):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(STEPS):
                optimizer.zero_grad()
                loss_of(one, mine()[0]).backward()
                optimizer.step()
        check_equal(dict(ours.named_parameters()), dict(theirs.named_parameters()))


def replicas_begin_alike() -> None:
    net = moetune.replicate(Deep(2, seed=dist.get_rank()))
    for name, value in net.named_parameters():
        if ".experts." not in name:
            first = value.detach().clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, value), name


def pieces_follow_the_schedule() -> None:
    for schedule, num_pieces in ((SPLIT, 6), (GradientSchedule(), 1)):
        net = moetune.replicate(Deep(4), schedule)
        num = sum(
            each.numel()
            for name, each in net.named_parameters()
            if each.requires_grad and ".experts." not in name
        )
        with counted_pieces() as first:
            loss_of(net, mine()[0]).backward()
        with counted_pieces() as second:
            loss_of(net, mine()[0]).backward()
        assert first == [num]
        assert sum(second) == num
        assert len(second) == num_pieces


def micro_batches_are_summed() -> None:
    wanted = expected(2)
    for degree in DEGREES:
        net = moetune.replicate(Deep(degree), SPLIT)
        for is_none in (True, False, True):
            net.zero_grad(set_to_none=is_none)
            first, second = mine(2)
            with counted_pieces() as sent, moetune.no_sync(net):
                (loss_of(net, first) / 2).backward()
            assert not sent
            (loss_of(net, second) / 2).backward()
            check_gradients(net, wanted)
        net.zero_grad()
        for x in mine(2):  # reduced twice, with the same result
            (loss_of(net, x) / 2).backward()
        check_gradients(net, wanted)
        net.zero_grad()
        losses = torch.stack([loss_of(net, x) for x in mine(2)])
        losses.mean().backward()  # two passes of one graph
        check_gradients(net, wanted)


def parameters_that_ranks_use_at_times() -> None:
    """Used on some ranks only, in the first step or a later one: nobody waits for ever."""
    for first, later in itertools.product((-1, 0, 1), repeat=2):
        net = moetune.replicate(Deep(4), SPLIT if first else None)
        for rank_without in (first, later, later):
            wanted = expected(used=rank_without.__ne__)
            net.zero_grad()
            loss_of(net, mine()[0], is_used=dist.get_rank() != rank_without).backward()
            check_gradients(net, wanted)


def checkpointed_passes_have_the_same_gradients() -> None:
    wanted = expected()
    net = moetune.replicate(Deep(4), SPLIT)
    for _ in range(STEPS):
        net.zero_grad()
        x = mine()[0].requires_grad_()
        checkpoint(loss_of, net, x, use_reentrant=False).backward()
        check_gradients(net, wanted)


def a_step_after_a_failed_one_is_right() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
            raise RuntimeError("broken")

    wanted = expected()
    net = moetune.replicate(Deep(4), SPLIT)
    loss_of(net, mine()[0]).backward()
    x = Broken.apply(mine()[0].requires_grad_())  # type: ignore[no-untyped-call] # torch's
    with pytest.raises(RuntimeError, match="broken"):
        loss_of(net, x).backward()
    for _ in range(2):
        net.zero_grad()
        loss_of(net, mine()[0]).backward()
        check_gradients(net, wanted)


def dtypes_have_buffers_of_their_own() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.dtypes = torch.float32, torch.float64, torch.bfloat16, torch.float64
            self.layers = nn.ModuleList(nn.Linear(5, 5, dtype=dtype) for dtype in self.dtypes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer, dtype in zip(self.layers, self.dtypes, strict=True):
                x = layer(x.to(dtype))
            return x.float().square().mean()

    pieces = (33, 38, 39, 130, 401)
    schedule = GradientSchedule(
        pieces=tuple(GradientPiece(phase=-1, chunk=None, end_bytes=end) for end in pieces)
    )
    inputs = [torch.randn(4, 5, generator=torch.Generator().manual_seed(one)) for one in range(2)]
    for given in (None, schedule):
        net, alone = moetune.replicate(Mixed(), given), Mixed()
        for _ in range(2):
            net.zero_grad()
            net(inputs[dist.get_rank() % 2]).backward()
            grads = [
                torch.autograd.grad(alone(inputs[rank % 2]), list(alone.parameters()))
                for rank in range(dist.get_world_size())
            ]
            for found, *ranks in zip(net.parameters(), *grads, strict=True):
                assert found.grad is not None
                mean = torch.stack(ranks).double().mean(0)
                torch.testing.assert_close(found.grad.double(), mean, rtol=2e-2, atol=1e-3)


def what_cannot_be_replicated_is_refused() -> None:
    net = moetune.replicate(Deep(1))
    with pytest.raises(InputError, match="replicated already"):
        moetune.replicate(net)
    with pytest.raises(InputError, match="not replicated"), moetune.no_sync(Deep(1)):
        pass
    net.frozen.requires_grad_()
    with pytest.raises(InputError, match=r"frozen.* was frozen when"):
        loss_of(net, mine()[0]).backward()
    with pytest.raises(InputError, match="the same tokens"):
        moetune.replicate(moetune.TensorExpertLayer(WIDTH, 18, 6))
    sparse = moetune.replicate(nn.Embedding(4, 4, sparse=True))
    with pytest.raises(InputError, match="sparse gradient"):
        sparse(torch.arange(3)).sum().backward()
    with pytest.raises(RankMismatchError, match="models and schedules differ"):
        moetune.replicate(nn.Linear(2, 2 + dist.get_rank()))
    with pytest.raises(RankMismatchError, match="models and schedules differ"):
        moetune.replicate(nn.Linear(2, 2), SPLIT if dist.get_rank() else None)


def a_gradient_that_grows_after_it_was_sent_is_refused() -> None:
    """Reentrant checkpoints run parts of a backward pass within it, one after the other."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.layer, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor, *, is_reentrant: bool) -> torch.Tensor:
            for _ in range(2):
                y: Any = checkpoint(self.layer, x, use_reentrant=is_reentrant)
                x = y
            result: torch.Tensor = self.last(x)
            return result.sum()

    ends = (64, 128)  # the last layer, and the one that is used twice
    schedule = GradientSchedule(
        pieces=tuple(GradientPiece(phase=-1, chunk=None, end_bytes=end) for end in ends)
    )
    net, x = Twice(), torch.randn(3, 4, requires_grad=True)
    wanted = torch.autograd.grad(net(x, is_reentrant=False), list(net.parameters()))
    for each in wanted:
        dist.all_reduce(each)
        each.div_(dist.get_world_size())
    moetune.replicate(net, schedule)
    net(x, is_reentrant=True).backward()  # all at the end
    for found, each in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(found.grad, each)
    with pytest.raises(InputError, match=r"layer\.weight got two gradients in one backward pass"):
        net(x, is_reentrant=True).backward()


def step(net: nn.Module) -> None:
    loss_of(net, mine()[0]).backward()


def plans_follow_recorded_steps() -> None:
    wanted = expected()
    for degree in DEGREES:
        net, recorder = moetune.replicate(Deep(degree)), HostRecorder()
        (layer, _) = (each for each in net.modules() if isinstance(each, MoELayer))
        layer.recorder = recorder
        plan = moetune.plan_gradients(net, partial(step, net))
        assert layer.recorder is recorder
        assert plan.alone_seconds <= plan.seconds <= plan.at_end_seconds
        told: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(told, plan.schedule)
        assert all(each == plan.schedule for each in told)
        for _ in range(2):
            net.zero_grad()
            with counted_pieces() as sent:
                loss_of(net, mine()[0]).backward()
            check_gradients(net, wanted)
            assert len(sent) in {len(plan.schedule.pieces), len(plan.schedule.pieces) + 1}
    alone = nn.Linear(4, 4)
    with pytest.raises(InputError, match="not replicated"):
        moetune.plan_gradients(alone, alone.zero_grad)
    moetune.replicate(alone)
    with pytest.raises(InputError, match="no backward pass"):
        moetune.plan_gradients(alone, alone.zero_grad)


def orders_that_differ_are_reduced_at_the_end() -> None:
    net = moetune.replicate(Deep(4))
    first = dist.get_rank() == 0
    with pytest.warns(UserWarning, match="different orders") if first else nullcontext():
        loss_of(net, mine()[0], is_used=first).backward()
    net.zero_grad()
    with counted_pieces() as sent:
        loss_of(net, mine()[0]).backward()
    assert len(sent) == 1
    check_gradients(net, expected())
    with pytest.raises(InputError, match="different orders"):
        moetune.plan_gradients(net, partial(step, net))


def a_parameter_that_one_rank_uses_first_has_the_same_place_on_all() -> None:
    net, first = moetune.replicate(Deep(4)), dist.get_rank() == 0
    for is_used in (False, first):
        loss_of(net, mine()[0], is_used=is_used).backward()
    moetune.plan_gradients(net, partial(step, net))
    net.zero_grad()
    step(net)
    check_gradients(net, expected())


CHECKS: Sequence[Callable[[], None]] = (
    equals_one_process,
    equals_ddp,
    replicas_begin_alike,
    pieces_follow_the_schedule,
    micro_batches_are_summed,
    parameters_that_ranks_use_at_times,
    checkpointed_passes_have_the_same_gradients,
    a_step_after_a_failed_one_is_right,
    dtypes_have_buffers_of_their_own,
    what_cannot_be_replicated_is_refused,
    a_gradient_that_grows_after_it_was_sent_is_refused,
    plans_follow_recorded_steps,
    orders_that_differ_are_reduced_at_the_end,
    a_parameter_that_one_rank_uses_first_has_the_same_place_on_all,
)


def several_ranks() -> None:
    for check in CHECKS:
        check()
