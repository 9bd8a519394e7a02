"""What ranks do in the tests of shared experts behind the exchanges."""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import moetune
from moetune.comm.group import OneRank
from moetune.comm.transfer import Transfer
from moetune.domain.constraints import Strategy
from moetune.domain.plan import Decision
from moetune.runtime.delayed import WeightGradients
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.plans.timers import CallWatch, Watch, device_clock
from moetune.runtime.trace import NoRecorder
from tests.runtime.reference import dense_moe
from tests.runtime.workers import (
    AUX_SCALE,
    D_HIDDEN,
    D_MODEL,
    NUM_EXPERTS,
    RELATIVE,
    TOKENS,
    all_weights,
    inputs_of,
    relative_error,
)

STRATEGIES: tuple[Strategy, ...] = ("none", "S1", "S2", "S3", "S4")
DEGREES = ((1, 1), (1, 3), (4, 2))
Events = list[tuple[str, ...]]


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


def pinned(layer: MoELayer, strategy: Strategy, degrees: tuple[int, int]) -> MoELayer:
    layer.poison_buffers()
    layer.pin(Decision(forward_degree=degrees[0], backward_degree=degrees[1], strategy=strategy))
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


def equal_dense(degrees: Sequence[tuple[int, int]] = DEGREES, **options: Any) -> None:
    """Hold every strategy against dense float64 with the shared expert added, on these ranks."""
    rank, num_ranks = rank_of()
    layer = layer_of(**options)
    weights, wanted, total = all_weights(layer), list[torch.Tensor](), torch.zeros(())
    shared = Shared()
    for each in range(num_ranks):
        x, dy = inputs_of(each, TOKENS)
        x.requires_grad_()
        y, aux, _ = dense_moe(
            x, weights, top_k=2, activation="gelu", normalize=True,
            capacity_factor=layer.gate.capacity_factor,
        )  # fmt: skip
        y = y + shared(x)
        term = torch.sum(y * dy) + AUX_SCALE * aux
        of_rank = torch.autograd.grad(
            term, [x, weights.gate, *shared.parameters()], retain_graph=True
        )
        total = total + term
        if each == rank:
            wanted = [y.detach(), *of_rank]
    total.backward()
    local = NUM_EXPERTS // num_ranks
    experts = {
        name: getattr(weights, name).grad[rank * local : (rank + 1) * local]
        for name, _ in layer.experts.named_parameters()
    }
    for strategy, degree in itertools.product(STRATEGIES, degrees):
        found = step(pinned(layer, strategy, degree))
        expected = [*wanted[:2], wanted[2], *experts.values(), *wanted[3:]]
        names = ["y", "x", "gate", *experts, "up", "down"]
        assert len(found) == len(names)
        for name, one, other in zip(names, found, expected, strict=True):
            assert relative_error(one, other) <= RELATIVE, (name, strategy, degree)


class Recorder(NoRecorder):
    """Writes down when exchanges are issued and waited for, and when experts run."""

    def __init__(self, events: Events) -> None:
        self.events = events

    def compute(self, *step: Any) -> contextlib.AbstractContextManager[None]:
        self.events.append(step[:2])
        return contextlib.nullcontext()

    def transfer(self, phase: str, name: str, chunk: int, transfer: Transfer, *_: Any) -> Transfer:
        self.events.append((phase, f"issues {name} {chunk}"))
        return _Waited(transfer, (phase, f"has {name} {chunk}"), self.events)


class _Waited:
    def __init__(self, inner: Transfer, name: tuple[str, ...], events: Events) -> None:
        self._inner, self._name, self._events = inner, name, events

    def wait(self) -> None:
        self._events.append(self._name)
        self._inner.wait()

    def future(self) -> torch.futures.Future[object] | None:
        return self._inner.future()


def order_of_a_step(degrees: tuple[int, int], *, is_timed: bool = False) -> Events:
    """Return what a step issues, waits for and computes, in order."""
    events: Events = []
    layer = pinned(layer_of(shared_experts=Shared(events=events)), "none", degrees)
    layer.recorder = Recorder(events)
    if is_timed:
        Timed(layer)
    step(layer)
    return events


def shared_runs_behind_the_exchanges() -> None:
    events = order_of_a_step((1, 1))
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
    timed = order_of_a_step((1, 1), is_timed=True)
    assert timed[:3] == [
        ("forward", "shared up"), ("forward", "shared down"), ("forward", "issues dispatch 0"),
    ]  # fmt: skip
    assert timed[-3:] == [
        ("backward", "has combine 0"), ("backward", "shared down"), ("backward", "shared up"),
    ]  # fmt: skip
    several = order_of_a_step((3, 2))
    first = [
        several.index(("forward", name))
        for name in ("issues dispatch 2", "shared up", "has dispatch 0")
    ]
    last = [
        several.index(("backward", name))
        for name in ("issues combine 1", "shared up", "has combine 0")
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
        layer = pinned(layer_of(), strategy, (2, 3))
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
    assert len(found) == len(wanted) > 5
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one, other) <= RELATIVE


def parts_of_a_graph() -> None:
    """Backward passes that ask for the experts' gradients alone leave nothing under way."""
    layer = pinned(layer_of(), "none", (2, 2))
    for strategy in STRATEGIES:
        pinned(layer, strategy, (2, 2))
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
        x.requires_grad_()
        loss = torch.sum(layer(x) * dy)
        if strategy in {"none", "S4"}:  # the others give host memory back
            first = torch.autograd.grad(loss, [x, *layer.parameters()], retain_graph=True)
            same(torch.autograd.grad(loss, [x, *layer.parameters()]), first)


def equal_beside_others() -> None:
    """Data-parallel wrappers sum the same gradients as one process."""
    rank, num_ranks = rank_of()

    def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = net(x)
        return y.square().mean()

    def block(**options: Any) -> nn.Sequential:
        torch.manual_seed(7)
        dense = nn.Linear(D_MODEL, D_MODEL, dtype=torch.float64)
        return nn.Sequential(dense, layer_of(**options), nn.Tanh(), layer_of(**options))

    batches = [inputs_of(0, (6 + at,))[0] * (at + 1) for at in range(num_ranks)]
    alone = block(communicator=OneRank())
    for x in batches:
        (loss_of(alone, x) / num_ranks).backward()
    wanted = own(alone)
    net = DistributedDataParallel(moetune.prepare_ddp(block(pipeline=2)))
    for _ in range(3):
        net.zero_grad()
        loss_of(net, batches[rank]).backward()
        same(own(net), wanted)
    sharded = block(pipeline=2)
    moetune.prepare_fsdp(sharded, mesh := init_device_mesh("cpu", (num_ranks,)))
    for part in (*sharded, sharded):
        fully_shard(part, mesh=mesh)
    for _ in range(2):
        sharded.zero_grad()
        loss_of(sharded, batches[rank]).backward()
        same(own(sharded), wanted)


def equal_after() -> None:
    """Other kinds of experts, with the module beside them and behind them."""
    num_ranks = rank_of()[1]
    turned = [*range(1, NUM_EXPERTS), 0]
    every: list[dict[str, Any]] = [{"activation": "swiglu"}, {"top_k": 1, "bias": False}]
    if num_ranks == 2:
        every.append({"placement": turned})
    for options in every:
        made = [layer_of(**options), layer_of(**options)]
        beside, behind = (pinned(each, "none", (2, 3)) for each in made)
        shared, behind.shared_experts = behind.shared_experts, None
        assert shared is not None
        found = step(beside)
        shared.zero_grad()
        wanted = step(behind, lambda x: behind(x) + shared(x))  # noqa: B023 - called here
        grads = [each.grad for each in shared.parameters()]
        same(found, [*wanted, *(each for each in grads if each is not None)])


def equal_where_weights_wait() -> None:
    """Gradients of weights that wait for a later pass, as under zero-bubble schedules."""
    layer = pinned(layer_of(), "none", (2, 2))
    wanted = step(layer)
    layer.weight_gradients = waiting = WeightGradients()
    layer.zero_grad()
    x, dy = inputs_of(rank_of()[0], TOKENS)
    y = layer(x.requires_grad_())
    (torch.sum(y * dy) + AUX_SCALE * layer.aux_loss).backward()
    assert layer.experts.w1.grad is None
    waiting.take()()
    grads = [each.grad for each in (x, *layer.parameters())]
    same([y.detach(), *(each for each in grads if each is not None)], wanted)


def first_of_a_model() -> None:
    """A layer whose tokens and weights want no gradients, and backward passes of a part."""
    rank, num_ranks = rank_of()
    events: Events = []

    def net_of(**options: Any) -> tuple[MoELayer, nn.Sequential]:
        layer, dense = layer_of(**options), nn.Linear(D_MODEL, D_MODEL).double()
        layer.gate.weight.requires_grad = False
        for parameter in dense.parameters():
            nn.init.constant_(parameter, 0.3)
        return layer, nn.Sequential(layer, dense)

    inputs = [inputs_of(0, (6 + at,))[0] for at in range(num_ranks)]
    _, alone = net_of(communicator=OneRank())
    for x in inputs:
        (alone(x).square().mean() / num_ranks).backward()
    layer, made = net_of()
    net = DistributedDataParallel(moetune.prepare_ddp(made))
    layer.recorder = Recorder(events)
    for _ in range(3):
        net.zero_grad()
        net(inputs[rank]).square().mean().backward()
        same(own(net), own(alone))
        assert events[-1] == ("backward", "has combine 0")  # nothing is left under way
        loss = net(inputs[rank].clone().requires_grad_()).square().mean()
        with net.no_sync():
            torch.autograd.grad(loss, [*layer.experts.parameters()])


def own(net: nn.Module) -> list[torch.Tensor]:
    """Return gradients, of all ranks' experts this rank's part."""
    rank, num_ranks = rank_of()
    found = []
    for name, each in net.named_parameters():
        grad = torch.zeros_like(each) if each.grad is None else each.grad
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()
        is_whole = ".experts." in name and len(grad) == NUM_EXPERTS
        found.append(grad.chunk(num_ranks)[rank].clone() if is_whole else grad.clone())
    return found


def two_ranks() -> None:
    equal_dense()
    equal_dense(((2, 3),), capacity_factor=0.7)
    shared_runs_behind_the_exchanges()
    equal_under_checkpoints()
    parts_of_a_graph()
    equal_after()
    equal_where_weights_wait()
    first_of_a_model()
    equal_beside_others()
