"""Reused memory: borrowed for a step, waited for, and given back."""

import pytest
import torch

from benchmarks.mpipemoe.live import HostMemory
from moetune.comm.group import Wait
from moetune.domain.errors import MoetuneError
from moetune.domain.layer import Activation
from moetune.domain.plan import Decision
from moetune.measure.device import drop
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.moe.offload import DeviceCopies
from moetune.runtime.moe.products import RowPart
from moetune.runtime.moe.weight_grads import GradientSum
from tests.runtime.poison import poison
from tests.runtime.workers import results_of


def make_layer(strategy: str) -> MoELayer:
    layer = MoELayer(8, 16, 4, 2, pipeline=4, memory_reuse=strategy)
    poison(layer)
    return layer


def test_without_gradients_nothing_leaves_for_the_host() -> None:
    layer = make_layer("S1")
    with torch.no_grad(), HostMemory() as host:
        layer(torch.randn(32, 8))
    assert host.peak_bytes == 0


def test_a_second_backward_pass_says_why_it_cannot_be() -> None:
    layer = make_layer("S1")
    loss = layer(torch.randn(32, 8, requires_grad=True)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(MoetuneError, match="second backward pass"):
        loss.backward()


class LateCopies(DeviceCopies):
    """Copies only when it is waited for, as late as a stream may."""

    def save(self, rows: torch.Tensor, host: torch.Tensor) -> Wait:
        return lambda: drop(host.copy_(rows))

    def load(self, host: torch.Tensor, rows: torch.Tensor) -> Wait:
        return lambda: drop(rows.copy_(host))


@pytest.mark.parametrize("num_experts", [1, 4])
@pytest.mark.parametrize("strategy", ["S1", "S2", "S3"])
def test_copies_are_waited_for_before_their_buffers_are_used(
    strategy: str, num_experts: int
) -> None:
    results = []
    for memory_reuse in ("none", strategy):
        torch.manual_seed(0)
        layer = MoELayer(
            8, 16, num_experts, pipeline=5, memory_reuse=memory_reuse, dtype=torch.float64
        )
        poison(layer)
        layer.dispatcher.copies = LateCopies()
        results.append(results_of(layer, torch.randn(37, 8, dtype=torch.float64)))
    for value, wanted in zip(*results, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)


class RecordedCopies(LateCopies):
    """Notes each load in a list that notes the GEMMs too."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def load(self, host: torch.Tensor, rows: torch.Tensor) -> Wait:
        self._events.append("load")
        return super().load(host, rows)


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_the_next_pre_activations_are_loaded_behind_the_last_two_gemms(
    activation: Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    degree, d_hidden, events = 3, 16, list[str]()
    honest = GradientSum.add_gemm

    def add_gemm(self: GradientSum, x: torch.Tensor, y: torch.Tensor, part: RowPart) -> None:
        events.append("w2" if x.shape[1] == d_hidden else "w1 or w3")
        honest(self, x, y, part)

    monkeypatch.setattr(GradientSum, "add_gemm", add_gemm)
    layer = MoELayer(8, d_hidden, 1, activation=activation, pipeline=degree, memory_reuse="S2")
    layer.dispatcher.copies = RecordedCopies(events)
    layer(torch.randn(24, 8, requires_grad=True)).sum().backward()
    gated = activation == "swiglu"
    loads = ["load"] * (1 + gated)
    chunk = ["w2", *["w1 or w3"] * gated, *loads, "w1 or w3"]
    last = ["w2", *["w1 or w3"] * (1 + gated)]
    assert events == [*loads, *chunk * (degree - 1), *last]


def test_the_plans_strategy_is_taken_and_can_be_overruled() -> None:
    layer = MoELayer(8, 16, 4, memory_reuse=True)
    layer.pin(Decision(forward_degree=2, backward_degree=2, strategy="S4"))
    layer(torch.randn(8, 8))
    assert layer.decision.strategy == "S4"
    stubborn = MoELayer(8, 16, 4, memory_reuse=False)
    stubborn.pin(Decision(forward_degree=2, backward_degree=2, strategy="S4"))
    stubborn(torch.randn(8, 8))
    assert stubborn.decision.strategy == "none"
