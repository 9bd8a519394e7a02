"""Experts with a fused gate behind a router of the caller's, against plain float64 autograd."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from moetune.comm.group import OneRank
from moetune.domain.constraints import Strategy
from moetune.domain.layer import LayerShape
from moetune.domain.plan import Decision
from moetune.runtime.moe.borrowed import BorrowedExperts, ExpertNames
from moetune.runtime.moe.fused import ClampedGate, FusedForm
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.moe.placement import ExpertPlacement
from moetune.runtime.moe.routed_layer import RoutedLayer
from tests.runtime.grouped_workers import grouped

SHAPE = LayerShape(d_model=6, d_hidden=10, num_experts=4, top_k=2, activation="swiglu")
FORMS = (
    FusedForm(),
    FusedForm(function="gelu", is_transposed=True),
    FusedForm(function="gelu_tanh", is_interleaved=True),
    FusedForm(function="relu", is_transposed=True, is_interleaved=True),
    FusedForm(is_interleaved=True, clamped=ClampedGate(alpha=1.7, limit=0.5)),
    FusedForm(is_transposed=True, clamped=ClampedGate(alpha=0.9, limit=0.8)),
)


class Stack(nn.Module):
    """Parameters of experts in the layout of a form."""

    def __init__(self, form: FusedForm, *, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        d, h = SHAPE.d_model, SHAPE.d_hidden
        self.up = nn.Parameter(form.stored(torch.randn(4, d, 2 * h).double()).contiguous())
        self.down = nn.Parameter(form.stored(torch.randn(4, h, d).double()).contiguous())
        self.up_bias = nn.Parameter(torch.randn(4, 2 * h).double()) if bias else None
        self.down_bias = nn.Parameter(torch.randn(4, d).double()) if bias else None


def dense(
    stack: Stack, form: FusedForm, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    y = torch.zeros_like(x)
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": nn.functional.silu, "gelu": nn.functional.gelu, "relu": torch.relu,
        "gelu_tanh": lambda g: nn.functional.gelu(g, approximate="tanh"),
    }  # fmt: skip
    for e in range(4):
        up, down = (each[e].T if form.is_transposed else each[e] for each in (stack.up, stack.down))
        both = x @ up + (0 if stack.up_bias is None else stack.up_bias[e])
        g, u = (both[:, ::2], both[:, 1::2]) if form.is_interleaved else both.chunk(2, dim=1)
        if form.clamped is None:
            hidden = functions[form.function](g) * u
        else:
            limit = form.clamped.limit
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
            hidden = (u + 1) * g * torch.sigmoid(form.clamped.alpha * g)
        out = hidden @ down + (0 if stack.down_bias is None else stack.down_bias[e])
        y = y + ((experts == e) * weights).sum(1, keepdim=True) * out
    return y


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_equals_dense(form: FusedForm, *, bias: bool, is_grouped: bool) -> None:
    stack = Stack(form, bias=bias)
    names = ExpertNames(up="up", down="down", up_bias="up_bias", down_bias="down_bias")
    names = names if bias else ExpertNames(up="up", down="down")
    experts = BorrowedExperts(stack, names, form, ExpertPlacement.of(OneRank(), 4))
    layer = RoutedLayer(SHAPE, experts, OneRank())
    layer.poison_buffers()
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(13, 6, generator=generator).double() for _ in range(2))
    weights = torch.rand(13, 2, generator=generator).double()
    chosen = torch.rand(13, 3, generator=generator).argsort(1)[:, :2]  # nobody takes the last
    wanted = [x.clone().requires_grad_(), weights.clone().requires_grad_(), *stack.parameters()]
    y = dense(stack, form, wanted[0], chosen, wanted[1])
    grads = torch.autograd.grad((y * dy).sum(), wanted)
    strategies: tuple[Strategy, ...] = ("none", "S1", "S4")
    for (forward, backward), strategy in itertools.product(((1, 1), (3, 2)), strategies):
        layer.pin(Decision(forward_degree=forward, backward_degree=backward, strategy=strategy))
        found = [x.clone().requires_grad_(), weights.clone().requires_grad_(), *stack.parameters()]
        with grouped() if is_grouped else nullcontext():
            same = layer(found[0], chosen, found[1])
            made = torch.autograd.grad((same * dy).sum(), found)
        torch.testing.assert_close(same, y, rtol=1e-12, atol=1e-12)
        for one, other, parameter in zip(made, grads, found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
            assert one.is_contiguous() == parameter.is_contiguous()


def test_gradients_of_a_fused_layer_pass_gradcheck_where_nothing_is_clamped() -> None:
    form = FORMS[4]
    stack = Stack(form, bias=True)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.mul_(0.05)
    names = ExpertNames(up="up", down="down", up_bias="up_bias", down_bias="down_bias")
    experts = BorrowedExperts(stack, names, form, ExpertPlacement.of(OneRank(), 4))
    layer = RoutedLayer(SHAPE, experts, OneRank(), pipeline=2)
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    chosen = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 3], [0, 2]])
    weights = torch.full((5, 2), 0.5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: layer(x, chosen, w), (x.requires_grad_(), weights))


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize(("degree", "strategy"), [(1, "none"), (4, "none"), (4, "S1"), (4, "S4")])
def test_halves_need_no_more_memory_than_three_matrices(
    degree: int, strategy: Strategy, *, is_grouped: bool
) -> None:
    form = FusedForm(is_transposed=True)
    experts = BorrowedExperts(
        Stack(form, bias=False), ExpertNames(up="up", down="down"), form,
        ExpertPlacement.of(OneRank(), 4),
    )  # fmt: skip
    fused = RoutedLayer(SHAPE, experts, OneRank())
    apart = MoELayer(6, 10, 4, 2, activation="swiglu", dtype=torch.float64)
    x, dy = torch.randn(2, 512, 6, dtype=torch.float64)
    x.requires_grad_()
    routing = apart.gate(x)
    for layer in (fused, apart):
        layer.pin(Decision(forward_degree=degree, backward_degree=degree, strategy=strategy))
    with grouped() if is_grouped else nullcontext():
        fused(x, routing.experts_TK, routing.weights_TK).backward(dy)
        apart(x).backward(dy)
    assert 0 < fused.memory.peak_device_bytes <= apart.memory.peak_device_bytes
    assert fused.memory.peak_host_bytes == apart.memory.peak_host_bytes
