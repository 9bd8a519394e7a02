"""Gradients of weights that wait: they are those of one backward pass, which exchanges once."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from moetune.comm.group import OneRank
from moetune.comm.transfer import Transfer
from moetune.domain.errors import InputError
from moetune.domain.layer import Activation
from moetune.domain.plan import Decision
from moetune.runtime.autograd import WeightGradients
from moetune.runtime.moe.layer import MoELayer

WIDTH, TOKENS = 16, 24


class Counting(OneRank):
    """One rank that counts its exchanges."""

    def __init__(self) -> None:
        self.count = 0

    def all_to_all(self, *args: Any, **kwargs: Any) -> Transfer:
        self.count += 1
        return super().all_to_all(*args, **kwargs)


def experts(activation: Activation, degree: int) -> MoELayer:
    return MoELayer(
        WIDTH, 20, 4, 2, activation=activation, pipeline=degree, communicator=Counting()
    ).double()


def gradients(make: Callable[[], nn.Module], *, waits: bool) -> Sequence[torch.Tensor | None]:
    """Return the gradients of the input and of the parameters."""
    torch.manual_seed(1)
    module, waiting = make().double(), WeightGradients()
    x = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    matrices = [
        (name, one) for name, one in module.named_parameters() if "bias" not in name and waits
    ]
    if waits:
        for part in module.modules():
            part.weight_gradients = waiting  # type: ignore[assignment]
    for _ in range(2):  # gradients of micro-batches add up
        (module(x) ** 2).sum().backward()
        before = [None if one.grad is None else one.grad.clone() for _, one in matrices]
        waiting.take()()
        for (name, one), earlier in zip(matrices, before, strict=True):
            assert one.grad is not None, name
            assert earlier is None or not torch.equal(one.grad, earlier), name
    return [x.grad, *(one.grad for one in module.parameters())]


@pytest.mark.parametrize(
    "make",
    [
        lambda: experts("gelu", 1),
        lambda: experts("relu", 2),
        lambda: experts("silu", 3),
        lambda: experts("swiglu", 3),
    ],
    ids=["gelu", "relu", "silu", "swiglu"],
)
def test_gradients_that_wait_are_those_of_one_pass(make: Callable[[], nn.Module]) -> None:
    for late, at_once in zip(
        gradients(make, waits=True), gradients(make, waits=False), strict=True
    ):
        torch.testing.assert_close(late, at_once, rtol=1e-12, atol=1e-12)


def test_experts_exchange_once_in_a_pass_that_is_split() -> None:
    counts = []
    for waiting in (None, WeightGradients()):
        layer = experts("gelu", 2)
        layer.weight_gradients = layer.gate.weight_gradients = waiting
        x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
        layer(x).sum().backward()
        assert isinstance(layer.communicator, Counting)
        before = layer.communicator.count
        if waiting is not None:
            waiting.take()()
        assert layer.communicator.count == before > 0
        counts.append(before)
    assert counts[0] == counts[1]


def test_gradients_wait_for_parameters_of_a_checkpoint() -> None:
    layer, waiting = experts("gelu", 1), WeightGradients()
    layer.weight_gradients = layer.gate.weight_gradients = waiting
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    waiting.take()()
    assert all(one.grad is not None for one in layer.parameters())


def test_frozen_weights_have_no_gradient() -> None:
    gate_and_experts, waiting = experts("gelu", 1), WeightGradients()
    gate_and_experts.weight_gradients = waiting
    gate_and_experts.experts.w1.requires_grad_(False)  # noqa: FBT003 - torch's own
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    gate_and_experts(x).sum().backward()
    waiting.take()()
    assert gate_and_experts.experts.w1.grad is None
    assert gate_and_experts.experts.w2.grad is not None


def test_memory_that_is_reused_holds_no_gradients_that_wait() -> None:
    layer = experts("gelu", 1)
    layer.pin(Decision(forward_degree=2, backward_degree=2, strategy="S4"))
    layer.weight_gradients = WeightGradients()
    with pytest.raises(InputError, match="S4"):
        layer(torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True))
