"""Backward passes of a part of a graph, and of passes that a checkpoint repeats."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from moetune.comm.group import Done, OneRank, Transfer
from moetune.domain.constraints import Strategy
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.plans.timers import CallWatch, Watch, device_clock
from tests.ranks import run_ranks
from tests.runtime.gpu_runs import decision
from tests.runtime.poison import poison
from tests.runtime.workers import (
    AUX_SCALE,
    D_HIDDEN,
    D_MODEL,
    NUM_EXPERTS,
    RELATIVE,
    TOKENS,
    inputs_of,
    relative_error,
)

STRATEGIES: tuple[Strategy, ...] = ("none", "S1", "S2", "S3", "S4")


def layer_of(strategy: Strategy, degree: int, **options: Any) -> MoELayer:
    torch.manual_seed(5)
    layer = MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, top_k=2, dtype=torch.float64, **options)
    poison(layer)
    layer.pin(decision(strategy, degree))
    return layer


def rank_of() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def step(
    layer: MoELayer,
    run: Callable[[torch.Tensor], torch.Tensor] | None = None,
    *,
    balance: float = AUX_SCALE,
) -> list[torch.Tensor]:
    """Return a step's output, the gradient of its input, and those of all parameters."""
    layer.zero_grad()
    x, dy = inputs_of(rank_of(), TOKENS)
    y = (run or layer)(x.requires_grad_())
    loss = torch.sum(y * dy)
    (loss + balance * layer.aux_loss if balance else loss).backward()
    grads = [each.grad for each in (x, *layer.parameters())]
    return [y.detach(), *(each for each in grads if each is not None)]


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
        layer = layer_of(strategy, 3)
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


def same(actual: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    assert len(actual) == len(wanted) > 3
    for value, expected in zip(actual, wanted, strict=True):
        assert relative_error(value, expected) <= RELATIVE


def parts_of_a_graph() -> None:
    """Backward passes that ask for the experts' gradients alone leave nothing under way."""
    for strategy in STRATEGIES:
        layer = layer_of(strategy, 2)
        wanted = step(layer)
        x, dy = inputs_of(rank_of(), TOKENS)
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
        same([*torch.autograd.grad(torch.sum(layer(x.detach()) * dy), experts)], wanted[3:])


def two_ranks() -> None:
    equal_under_checkpoints()
    parts_of_a_graph()


def test_two_ranks_equal_whole_passes() -> None:
    assert run_ranks(two_ranks, 2) == [""] * 2


def test_one_rank_equals_whole_passes() -> None:
    two_ranks()


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
        place = next((at for at, entry in enumerate(under_way) if entry[0] is self._mine[0]), None)
        if place is not None:
            for output, rows in reversed(under_way[: place + 1]):
                output.copy_(rows)
            del under_way[: place + 1]


@pytest.mark.parametrize("strategy", ["none", "S1", "S4"])
def test_results_that_nobody_asks_for_never_arrive_in_the_next_steps_buffers(
    strategy: Strategy,
) -> None:
    results = []
    for communicator in (OneRank(), Lingering()):
        layer = layer_of(strategy, 2, communicator=communicator)
        x, dy = inputs_of(0, TOKENS)
        for _ in range(2):
            loss = torch.sum(layer(x.clone().requires_grad_()) * dy)
            torch.autograd.grad(loss, [*layer.experts.parameters()])
            results.append(step(layer))
    for result in results[1:]:
        same(result, results[0])
