"""What ranks do in the tests of `moetune.BatchOverlap`."""

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import moetune
from moetune.comm.group import OneRank
from moetune.comm.transfer import Transfer
from moetune.domain.errors import InputError
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.trace import NoRecorder
from tests.runtime.companion_nets import Net, batch, check_equal
from tests.runtime.replicate_workers import Deep

Used = tuple[torch.Tensor, bool]
"""Tokens, and whether `sometimes` is used."""
POLICIES = ("none", "S1", "S2", "S3", "S4")


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss with the layers' own, which belong to one batch each."""
    y: torch.Tensor = net(x)
    balance = [each.aux_loss for each in net.modules() if isinstance(each, MoELayer)]
    return y.square().mean() + 0.1 * torch.stack(balance).sum()


def wanted(make: Any, indices: list[int]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Return the gradients of one process, batch by batch, and the losses."""
    net = make(communicator=OneRank())
    losses = []
    for index in indices:
        losses.append(loss_of(net, batch(index)))
        (losses[-1] / dist.get_world_size()).backward()
    return grads_of(net), [each.detach() for each in losses]


def grads_of(net: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(each) if each.grad is None else each.grad
        for name, each in net.named_parameters()
        if each.requires_grad
    }


def check_gradients(net: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """Compare gradients with one process', of the experts with this rank's part."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = {
        name: each.chunk(world)[rank] if ".experts." in name else each
        for name, each in expected.items()
    }
    found = grads_of(net)
    is_used = {name: bool(each.any()) for name, each in mine.items()}
    assert is_used == {name: bool(each.any()) for name, each in found.items()}
    check_equal(
        {name: each for name, each in found.items() if is_used[name]},
        {name: each for name, each in mine.items() if is_used[name]},
    )


def equal_gradients() -> None:
    """Every policy and degree: replicated, three steps, against one process."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for policy, degree in (("none", 1), *zip(POLICIES, (3, 2, 3, 3, 2), strict=True)):
        options: dict[str, Any] = {
            "pipeline": degree,
            "memory_reuse": policy if policy != "none" else False,
        }
        net = moetune.replicate(Net(num_experts=6, **options))
        for layer in net.modules():
            if isinstance(layer, MoELayer):
                layer.poison_buffers()
        overlap = moetune.BatchOverlap[torch.Tensor](net, partial(loss_of, net))
        for step in range(2):
            first = 2 * world * step
            expected, losses = wanted(
                lambda **given: Net(num_experts=6, pipeline=1, **given),
                [*range(first, first + 2 * world)],
            )
            net.zero_grad()
            found = overlap([batch(first + rank), batch(first + world + rank)])
            check_gradients(net, expected)
            for one, index in zip(found, (rank, world + rank), strict=True):
                assert torch.allclose(one, losses[index], rtol=1e-11)


def other_uses() -> None:
    """Parameters used twice, never, or by one batch; ranks with other numbers of tokens."""
    world, rank = dist.get_world_size(), dist.get_rank()
    net = moetune.replicate(Deep(4))
    batches = [
        (batch(at)[: 3 + at % 3], bool(at % 2)) for at in range(2 * world)
    ]  # the first batch of a rank, or the second, does not use `sometimes`

    def loss(net: nn.Module, given: Used) -> torch.Tensor:
        y: torch.Tensor = net(given[0], is_used=given[1])
        return y.square().mean()

    alone = Deep(1, is_alone=True)
    for each in batches:
        (loss(alone, each) / world).backward()
    overlap = moetune.BatchOverlap[Used](net, partial(loss, net))
    for _ in range(3):
        net.zero_grad()
        overlap([batches[rank], batches[world + rank]])
        check_gradients(net, grads_of(alone))
    # On its own again, and summed without a reduction.
    net.zero_grad()
    with moetune.no_sync(net):
        overlap([batches[rank], batches[world + rank]])
    (loss(net, batches[rank]) * 0).backward()
    check_gradients(net, grads_of(alone))


class IssueOrder(NoRecorder):
    """The steps of all batches in the order in which they are issued."""

    def __init__(self) -> None:
        self.steps: list[tuple[object, ...]] = []

    def compute(self, *step: object) -> contextlib.AbstractContextManager[None]:
        self.steps.append(step[:2])
        return contextlib.nullcontext()

    def transfer(self, *step: Any) -> Transfer:
        self.steps.append(step[:2])
        transfer: Transfer = step[3]
        return transfer


def really_beside() -> None:
    """While one batch's rows travel, the other's dense layers run."""
    net = moetune.replicate(Net(num_experts=6, pipeline=1))
    recorder = IssueOrder()
    spans: list[str] = []
    net.moe.recorder = recorder
    net.before.register_forward_hook(lambda *_: spans.append(f"dense {dist.get_rank()}"))
    net.moe.register_forward_hook(lambda *_: spans.append("moe"))
    overlap = moetune.BatchOverlap[torch.Tensor](net, partial(loss_of, net))
    overlap([batch(0), batch(1)])
    assert spans[:2] == [f"dense {dist.get_rank()}"] * 2
    turns = ["dispatch", "dispatch", "experts", "combine", "experts", "combine"]
    for phase in ("forward", "backward"):
        assert [name for its, name in recorder.steps if its == phase] == turns


def failures() -> None:
    """The first error is told, nothing hangs, and the next step is right."""
    rank, world = dist.get_rank(), dist.get_world_size()
    net = moetune.replicate(Net(num_experts=6))
    fails_at = {0: False, 1: False}

    def loss(given: tuple[int, torch.Tensor]) -> torch.Tensor:
        value = loss_of(net, given[1])
        if fails_at[given[0]]:
            raise ValueError(f"batch {given[0]}")
        return value

    overlap = moetune.BatchOverlap(net, loss)
    batches = [(0, batch(rank)), (1, batch(world + rank))]
    for which in (0, 1):
        fails_at[which] = True
        with pytest.raises(ValueError, match=f"batch {which}"):
            overlap(batches)
        fails_at[which] = False
    net.zero_grad()
    overlap(batches)
    expected, _ = wanted(
        lambda **given: Net(num_experts=6, pipeline=1, **given), [*range(2 * world)]
    )
    check_gradients(net, expected)
    with pytest.raises(InputError, match="there are 3"):
        overlap([*batches, batches[0]])
    plain = moetune.replicate(Net(num_experts=6))
    two = moetune.BatchOverlap[torch.Tensor](plain, partial(loss_of, plain))
    with pytest.raises(InputError, match="of one batch"):
        moetune.plan_gradients(plain, lambda: two([batch(0), batch(1)]))
    wrapped = nn.parallel.DistributedDataParallel(moetune.prepare_ddp(Net(num_experts=6)))
    with pytest.raises(InputError, match="DistributedDataParallel"):
        moetune.BatchOverlap[torch.Tensor](wrapped, partial(loss_of, wrapped))


class Dropping(nn.Module):
    """Dropout before, between and behind two layers of experts, in blocks computed again or not."""

    def __init__(self, *, is_checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Net(seed=one, num_experts=6, pipeline=2) for one in (1, 2))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for net in self.blocks:
            x = checkpoint(self._block, net, x, use_reentrant=False) if self.is_checkpointed else (
                self._block(net, x)
            )  # fmt: skip
        return x

    @staticmethod
    def _block(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(net, Net)
        x = nn.functional.dropout(net.before(x), 0.4)
        y: torch.Tensor = x + nn.functional.dropout(net.moe(x), 0.4)
        return y


def _mean_square(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = net(x)
    return y.square().mean()


def draws_of_their_own() -> None:
    """Dropout is that of one batch alone, differs between batches, and is drawn again alike."""
    rank = dist.get_rank()
    found = []
    for is_checkpointed in (False, True):
        net = moetune.replicate(Dropping(is_checkpointed=is_checkpointed))
        overlap = moetune.BatchOverlap[torch.Tensor](net, partial(_mean_square, net))
        torch.manual_seed(rank)
        losses = [overlap([batch(rank)] * 2)]
        left = torch.get_rng_state()
        losses.append(overlap([batch(rank)] * 2))
        torch.manual_seed(rank)
        with moetune.no_sync(net), torch.no_grad():
            alone = _mean_square(net, batch(rank))
        assert torch.equal(losses[0][0], alone)
        assert torch.equal(left, torch.get_rng_state()), "the caller goes on where it would alone"
        assert len({float(one) for both in losses for one in both}) == len(losses) * 2
        used = {name: each for name, each in grads_of(net).items() if ".after." not in name}
        found.append((losses, used))
    (losses, grads), (again, same) = found
    assert losses == again
    check_equal(grads, same)


def several_ranks() -> None:
    """All of the above in one start of the ranks."""
    equal_gradients()
    other_uses()
    really_beside()
    draws_of_their_own()
    failures()
