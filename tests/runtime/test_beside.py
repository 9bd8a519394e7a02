"""Shared experts behind a layer's exchanges: the same numbers, in another order of work."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from moetune.comm.group import OneRank
from moetune.comm.transfer import Done, Transfer
from moetune.domain.constraints import Strategy
from moetune.domain.errors import InputError
from moetune.runtime.moe.layer import MoELayer
from tests.cuda_kit import FakeCuda
from tests.ranks import run_ranks
from tests.runtime import beside_workers as workers
from tests.runtime.gpu_runs import (
    GPU,
    NCCL,
    STRATEGIES,
    decision,
    moe_layer,
    on_every_rank,
    step,
)
from tests.runtime.workers import TOKENS, inputs_of


def test_one_rank_equals_the_dense_layer_with_its_shared_expert() -> None:
    workers.equal_dense()
    workers.equal_dense(((3, 2),), capacity_factor=0.7)


def test_two_ranks_equal_it_and_hide_the_shared_expert() -> None:
    assert run_ranks(workers.two_ranks, 2) == [""] * 2


def test_parts_of_a_graph_leave_nothing_under_way() -> None:
    workers.parts_of_a_graph()


@pytest.mark.parametrize("degrees", [(1, 1), (4, 3)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gpus_wait_for_what_they_need(strategy: Strategy, degrees: tuple[int, int]) -> None:
    def program(_: FakeCuda) -> None:
        shared = nn.Sequential(nn.Linear(8, 12, device=GPU), nn.Linear(12, 8, device=GPU))
        layer = moe_layer(shared_experts=shared)
        layer.pin(decision(strategy, degrees))
        for num_tokens in (24, 31, 24):
            step(layer, num_tokens=num_tokens)

    on_every_rank(program)


def test_on_a_gpu_exchanges_hide_the_shared_expert_in_both_passes() -> None:
    def program(cuda: FakeCuda, *, kind: str) -> None:
        torch.cuda.set_device(GPU)
        shared = nn.Sequential(*(nn.Linear(8, 8, device=GPU) for _ in range(3)))
        layer = moe_layer(shared_experts=shared if kind == "beside" else None)
        layer.pin(decision("none", (1, 1)))
        x = torch.randn(24, 8, device=GPU, requires_grad=True)
        layer(x)  # the first call compares the ranks' layers
        lane = cuda.current_stream(GPU).lane
        begin = lane.seconds
        y = layer(x) + shared(x) if kind == "after" else layer(x)
        forward = lane.seconds
        y.sum().backward()
        seconds[kind] = forward - begin, lane.seconds - forward

    seconds: dict[str, tuple[float, float]] = {}
    for kind in ("alone", "after", "beside"):
        on_every_rank(partial(program, kind=kind), backends=NCCL, seconds=20e-3)
    for alone, after, beside in zip(*seconds.values(), strict=True):
        assert after - alone > 3e-3  # three products at least, of a millisecond each
        assert beside - alone < 0.5 * (after - alone)


class Lingering(OneRank):
    """One rank whose rows arrive when they are waited for, or behind any later exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: list[tuple[torch.Tensor, torch.Tensor]] = []

    def all_to_all(
        self, output: torch.Tensor, rows: torch.Tensor, *_: object, **__: object
    ) -> Transfer:
        if not rows.is_floating_point():
            return super().all_to_all(output, rows)
        mine = output.detach(), rows.detach()
        self.under_way.append(mine)
        return _Lingers(self, mine)


class _Lingers(Done):
    def __init__(self, link: Lingering, mine: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._link, self._mine = link, mine

    def wait(self) -> None:
        under_way = self._link.under_way
        place = next((at for at, one in enumerate(under_way) if one[0] is self._mine[0]), None)
        if place is not None:
            for output, rows in reversed(under_way[: place + 1]):
                output.copy_(rows)
            del under_way[: place + 1]


@pytest.mark.parametrize("strategy", ["none", "S1", "S4"])
def test_results_that_nobody_asks_for_never_arrive_in_the_next_steps_buffers(
    strategy: Strategy,
) -> None:
    found = []
    for communicator in (OneRank(), Lingering()):
        layer = workers.pinned(workers.layer_of(communicator=communicator), strategy, (2, 2))
        x, dy = inputs_of(0, TOKENS)
        for _ in range(2):
            loss = torch.sum(layer(x.clone().requires_grad_()) * dy)
            torch.autograd.grad(loss, [*layer.experts.parameters()])
            found.append(workers.step(layer))
    for one in found[1:]:
        workers.same(one, found[0])


def test_the_callers_autocast_and_checkpoints_are_those_of_its_shared_experts() -> None:
    seen: list[torch.dtype] = []

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(x)
            seen.append(y.dtype)
            return y

    layer = MoELayer(8, 12, 4, 2, shared_experts=Cast())
    x = torch.randn(16, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.float32
    layer(x)
    assert seen == [torch.bfloat16, torch.float32]
    kept: list[object] = []

    def policy(context: Any, op: object, *_: object, **__: object) -> CheckpointPolicy:
        if op is torch.ops.aten.addmm.default and not context.is_recompute:
            kept.append(op)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    selective = partial(
        checkpoint, layer, use_reentrant=False,
        context_fn=partial(create_selective_checkpoint_contexts, policy),
    )  # fmt: skip
    found = []
    for run in (layer, selective):
        given = x.clone().requires_grad_()
        layer.zero_grad()
        run(given).square().sum().backward()
        found.append([given.grad, *(each.grad for each in layer.parameters())])
    assert len(kept) == 1  # the shared expert's product, and none of the layer's
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_modes_and_batches_in_bfloat16_add_up_in_the_inputs_dtype() -> None:
    layer = MoELayer(8, 12, 4, 2, dtype=torch.bfloat16, shared_experts=nn.Linear(8, 8).bfloat16())
    x = torch.randn(2, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    assert y.shape == x.shape
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad is not None


class _InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)


def test_shared_experts_that_are_none_are_refused_by_name() -> None:
    layer = MoELayer(8, 12, 4, 2, shared_experts=nn.Linear(8, 4))
    with pytest.raises(InputError, match=r"return \(16, 4\) for tokens \(16, 8\)"):
        layer(torch.randn(16, 8))
    with pytest.raises(InputError, match="change their input in place"):
        MoELayer(8, 12, 4, 2, shared_experts=_InPlace())(torch.randn(16, 8))
    layer.shared_experts = nn.Linear(8, 8)  # a failure leaves nothing behind
    assert layer(torch.randn(16, 8)).shape == (16, 8)
