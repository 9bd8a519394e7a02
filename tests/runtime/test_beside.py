"""Shared experts behind a layer's exchanges: the same numbers, in another order of work."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from moetune.comm.group import Done, OneRank, Transfer
from moetune.domain.constraints import Strategy
from moetune.domain.errors import InputError
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.plans.timers import CallWatch, Watch, device_clock
from tests.cuda_kit import FakeCuda
from tests.ranks import run_ranks
from tests.runtime import gpu_runs
from tests.runtime.gpu_runs import GPU, NCCL, decision, moe_layer, on_every_rank
from tests.runtime.workers import (
    AUX_SCALE,
    D_HIDDEN,
    D_MODEL,
    NUM_EXPERTS,
    RELATIVE,
    TOKENS,
    Events,
    Recorder,
    check_against_dense,
    dense_of,
    inputs_of,
    relative_error,
)

STRATEGIES: tuple[Strategy, ...] = ("none", "S1", "S2", "S3", "S4")
DEGREES = (1, 3, 4)


class Mark(torch.autograd.Function):
    """Writes down when a value is computed, and when its gradient is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, events: Events, name: str) -> torch.Tensor:
        events.append(("forward", name))
        ctx.events, ctx.name = events, name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.events.append(("backward", ctx.name))
        return grads[0], None, None


def mark(x: torch.Tensor, events: Events, name: str) -> torch.Tensor:
    # torch gives `Function.apply` no types.
    marked: torch.Tensor = Mark.apply(x, events, name)  # type: ignore[no-untyped-call]  # of torch
    return marked


class Shared(nn.Module):
    """A shared expert of two products, which can write down when they run."""

    def __init__(self, width: int = D_MODEL, hidden: int = 5, events: Events | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.up, self.down = (
            nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64) / 2)
            for shape in ((width, hidden), (hidden, width))
        )
        self.events: Events = [] if events is None else events

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = mark(x @ self.up, self.events, "shared up")
        y = torch.tanh(hidden) @ self.down
        return mark(y, self.events, "shared down")


def layer_of(**options: Any) -> MoELayer:
    torch.manual_seed(5)
    given: dict[str, Any] = {"dtype": torch.float64, "shared_experts": Shared(), **options}
    return MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, **{"top_k": 2, **given})


def rank_of() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def pinned(layer: MoELayer, strategy: Strategy, degree: int) -> MoELayer:
    layer.poison_buffers()
    layer.pin(decision(strategy, degree))
    return layer


def step(
    layer: MoELayer,
    run: Callable[[torch.Tensor], torch.Tensor] | None = None,
    *,
    balance: float = AUX_SCALE,
) -> list[torch.Tensor]:
    """Return a step's output, the gradient of its input, and those of all parameters."""
    layer.zero_grad()
    x, dy = inputs_of(rank_of()[0], TOKENS)
    y = (run or layer)(x.requires_grad_())
    loss = torch.sum(y * dy)
    (loss + balance * layer.aux_loss if balance else loss).backward()
    grads = [each.grad for each in (x, *layer.parameters())]
    return [y.detach(), *(each for each in grads if each is not None)]


def equal_dense(degrees: Sequence[int] = DEGREES, **options: Any) -> None:
    """Hold every strategy against dense float64 with the shared expert added, on these ranks."""
    layer = layer_of(**options)
    dense = dense_of(layer, TOKENS)
    for strategy, degree in itertools.product(STRATEGIES, degrees):
        layer.zero_grad()
        check_against_dense(pinned(layer, strategy, degree), dense)


def order_of_a_step(degree: int, *, is_timed: bool = False) -> Events:
    """Return what a step issues, waits for and computes, in order."""
    events: Events = []
    layer = pinned(layer_of(shared_experts=Shared(events=events)), "none", degree)
    layer.recorder = Recorder(events)
    if is_timed:
        Timed(layer)
    step(layer)
    return [event for event in events if "weights" not in event[1]]


def shared_runs_behind_the_exchanges() -> None:
    events = order_of_a_step(1)
    assert events == [
        ("forward", "issues dispatch 0"),
        ("forward", "shared up"), ("forward", "shared down"),
        ("forward", "has dispatch 0"), ("forward", "experts"),
        ("forward", "issues combine 0"), ("forward", "has combine 0"),
        ("backward", "issues dispatch 0"), ("backward", "has dispatch 0"), ("backward", "experts"),
        ("backward", "issues combine 0"),
        ("backward", "shared down"), ("backward", "shared up"),
        ("backward", "has combine 0"),
    ]  # fmt: skip
    timed = order_of_a_step(1, is_timed=True)
    assert timed[:3] == [
        ("forward", "shared up"), ("forward", "shared down"), ("forward", "issues dispatch 0"),
    ]  # fmt: skip
    assert timed[-3:] == [
        ("backward", "has combine 0"), ("backward", "shared down"), ("backward", "shared up"),
    ]  # fmt: skip
    several = order_of_a_step(3)
    first = [
        several.index(("forward", name))
        for name in ("issues dispatch 2", "shared up", "has dispatch 0")
    ]
    last = [
        several.index(("backward", name))
        for name in ("issues combine 2", "shared up", "has combine 0")
    ]
    assert first == sorted(first)
    assert last == sorted(last)


class Timed:
    """Times every other call of a layer, as a search or a monitor does."""

    def __init__(self, layer: MoELayer) -> None:
        self.calls: list[CallWatch] = []
        self._number = 0
        # The layer has no public way to be timed at fixed calls.
        layer._decisions.watch = self.watch  # type: ignore[method-assign]

    def watch(self, num_tokens: int, dtype: torch.dtype, device: torch.device) -> Watch:
        del dtype
        self._number += 1
        if self._number % 2:
            return CallWatch(
                device_clock, device, tokens_per_rank=num_tokens, note=self.calls.append
            )
        return Watch()


def equal_under_checkpoints() -> None:
    """Repeated passes, of which one is timed and the other is not, and both of one batch."""
    for strategy in ("none", "S1", "S4"):
        layer = pinned(layer_of(), strategy, 3)
        again = partial(checkpoint, layer, use_reentrant=True)
        same(step(layer, again, balance=0), step(layer, balance=0))
        wanted, again = step(layer), partial(checkpoint, layer, use_reentrant=False)
        same(step(layer, again), wanted)
        timed = Timed(layer)
        same(step(layer), wanted)
        same(step(layer), wanted)
        for _ in range(2):
            same(step(layer, again), wanted)
            same(step(layer), wanted)
        assert any(call.seconds() for call in timed.calls)


def same(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    assert len(found) == len(wanted) > 3
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one, other) <= RELATIVE


def parts_of_a_graph() -> None:
    """Backward passes that ask for the experts' gradients alone leave nothing under way."""
    for strategy in STRATEGIES:
        layer = pinned(layer_of(), strategy, 2)
        wanted = step(layer)
        x, dy = inputs_of(rank_of()[0], TOKENS)
        loss = torch.sum(layer(x.clone().requires_grad_()) * dy)
        experts = [*layer.experts.parameters()]
        # The experts' backward pass is done, and nobody asks for the gradient of x.
        torch.autograd.grad(loss, experts, retain_graph=True)
        same(step(layer), wanted)
        frozen = layer(x)  # gradients of its input are not wanted at all
        torch.autograd.grad(torch.sum(frozen * dy), [*layer.parameters()], allow_unused=True)
        same(step(layer), wanted)
        with torch.no_grad():
            assert relative_error(layer(x), wanted[0]) <= RELATIVE
        with torch.inference_mode():
            assert relative_error(layer(x), wanted[0]) <= RELATIVE
        loss = torch.sum(layer(x.requires_grad_()) * dy)
        if strategy in {"none", "S4"}:  # the others give host memory back
            first = torch.autograd.grad(loss, [x, *layer.parameters()], retain_graph=True)
            same(torch.autograd.grad(loss, [x, *layer.parameters()]), first)
        layer.gate.weight.requires_grad = False  # nor of the weights, as in front of a model
        same([*torch.autograd.grad(torch.sum(layer(x.detach()) * dy), experts)], wanted[3:-2])


def two_ranks() -> None:
    equal_dense()
    equal_dense((3,), capacity_factor=0.7)
    equal_dense((3,), activation="swiglu")
    equal_dense((3,), top_k=1, bias=False)
    shared_runs_behind_the_exchanges()
    equal_under_checkpoints()
    parts_of_a_graph()


def test_one_rank_equals_the_dense_layer_with_its_shared_expert() -> None:
    equal_dense()
    equal_dense((2,), capacity_factor=0.7)


def test_two_ranks_equal_it_and_hide_the_shared_expert() -> None:
    assert run_ranks(two_ranks, 2) == [""] * 2


def test_parts_of_a_graph_leave_nothing_under_way() -> None:
    parts_of_a_graph()


@pytest.mark.parametrize("degree", [1, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gpus_wait_for_what_they_need(strategy: Strategy, degree: int) -> None:
    def program(_: FakeCuda) -> None:
        shared = nn.Sequential(nn.Linear(8, 12, device=GPU), nn.Linear(12, 8, device=GPU))
        layer = moe_layer(shared_experts=shared)
        layer.pin(decision(strategy, degree))
        for num_tokens in (24, 31, 24):
            gpu_runs.step(layer, num_tokens=num_tokens)

    on_every_rank(program)


def test_on_a_gpu_exchanges_hide_the_shared_expert_in_both_passes() -> None:
    def program(cuda: FakeCuda, *, kind: str) -> None:
        torch.cuda.set_device(GPU)
        shared = nn.Sequential(*(nn.Linear(8, 8, device=GPU) for _ in range(3)))
        layer = moe_layer(shared_experts=shared if kind == "beside" else None)
        layer.pin(decision("none", 1))
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
            return super().all_to_all(output, rows, None, None, "numbers")
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
        layer = pinned(layer_of(communicator=communicator), strategy, 2)
        x, dy = inputs_of(0, TOKENS)
        for _ in range(2):
            loss = torch.sum(layer(x.clone().requires_grad_()) * dy)
            torch.autograd.grad(loss, [*layer.experts.parameters()])
            found.append(step(layer))
    for one in found[1:]:
        same(one, found[0])


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
