"""Borrowed experts with three matrices (E, out, in), against plain float64 autograd."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from moetune.comm.group import OneRank
from moetune.domain.constraints import Strategy
from moetune.domain.layer import LayerShape
from moetune.domain.plan import Decision
from moetune.runtime.moe.borrowed import BorrowedExperts, ExpertNames
from moetune.runtime.moe.placement import ExpertPlacement
from moetune.runtime.moe.routed_layer import RoutedLayer
from tests.runtime.grouped_workers import grouped

SHAPE = LayerShape(d_model=6, d_hidden=10, num_experts=4, top_k=2, activation="swiglu")
NAMES = ExpertNames(up="w1", down="w2", factor="w3")


class Stack(nn.Module):
    """Parameters of experts as `nn.Linear` has them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in (("w1", (10, 6)), ("w2", (6, 10)), ("w3", (10, 6))):
            value = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(value))


def layer_of(stack: Stack) -> RoutedLayer:
    experts = BorrowedExperts(stack, NAMES, None, ExpertPlacement.of(OneRank(), 4))
    return RoutedLayer(SHAPE, experts, OneRank())


def dense(
    stack: nn.Module, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    y = torch.zeros_like(x)
    w1, w2, w3 = stack.w1, stack.w2, stack.w3
    for e in range(4):
        hidden = nn.functional.silu(x @ w1[e].T) * (x @ w3[e].T)  # type: ignore[index]
        weight = ((experts == e) * weights).sum(1, keepdim=True)
        y = y + weight * (hidden @ w2[e].T)  # type: ignore[index]
    return y


def inputs() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(13, 6, generator=generator).double() for _ in range(2))
    weights = torch.rand(13, 2, generator=generator).double()
    return x, dy, weights, torch.rand(13, 3, generator=generator).argsort(1)[:, :2]


@pytest.mark.parametrize("is_grouped", [False, True])
def test_three_matrices_equal_dense_and_gradients_are_laid_out_as_parameters(
    *, is_grouped: bool
) -> None:
    stack = Stack()
    layer = layer_of(stack)
    layer.poison_buffers()
    x, dy, weights, chosen = inputs()  # nobody takes the last expert
    wanted = [x.clone().requires_grad_(), weights.clone().requires_grad_(), *stack.parameters()]
    y = dense(stack, wanted[0], chosen, wanted[1])
    grads = torch.autograd.grad((y * dy).sum(), wanted)
    strategies: tuple[Strategy, ...] = ("none", "S1", "S4")
    for (forward, backward), strategy in itertools.product(((1, 1), (3, 2)), strategies):
        layer.pin(Decision(forward_degree=forward, backward_degree=backward, strategy=strategy))
        found = [x.clone().requires_grad_(), weights.clone().requires_grad_(), *stack.parameters()]
        with grouped() if is_grouped else nullcontext():
            same = layer(found[0], chosen, found[1])
            made = torch.autograd.grad((same * dy).sum(), found)
        torch.testing.assert_close(same, y, rtol=1e-12, atol=1e-12)
        for one, other in zip(made, grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
            assert one.is_contiguous()


def test_gradients_of_wider_parameters_are_laid_out_as_these() -> None:
    stack = Stack().float()
    layer = layer_of(stack)
    layer.pin(Decision(forward_degree=2, backward_degree=3))
    x, dy, weights, chosen = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x.float().requires_grad_(), chosen, weights.float())
    made = torch.autograd.grad((y * dy.float()).sum(), list(stack.parameters()))
    exact = Stack()
    wanted = torch.autograd.grad(
        (dense(exact, x, chosen, weights) * dy).sum(), list(exact.parameters())
    )
    for one, other in zip(made, wanted, strict=True):
        assert one.dtype == torch.float32
        assert one.is_contiguous()
        assert (one - other).norm() < 0.02 * other.norm()
