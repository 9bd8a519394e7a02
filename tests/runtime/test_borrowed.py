"""Borrowed experts, fused or of three matrices, behind a router: against plain float64 autograd."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from benchmarks.mpipemoe.live import HostMemory, live_tensors
from moetune.comm.group import OneRank, ReduceOp, Transfer
from moetune.domain.constraints import Strategy
from moetune.domain.layer import LayerShape
from moetune.runtime.moe.activations import ClampedGate, FusedForm
from moetune.runtime.moe.expert_module import BorrowedExperts, ExpertNames
from moetune.runtime.moe.layer import MoELayer, RoutedLayer
from moetune.runtime.moe.placement import ExpertPlacement
from moetune.runtime.moe.weight_grads import GradientMean
from tests.runtime.gpu_runs import decision
from tests.runtime.grouped_workers import grouped
from tests.runtime.poison import poison

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
    """Parameters of experts in the layout of a form; None for three matrices of `nn.Linear`."""

    def __init__(self, form: FusedForm | None, *, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, d, h = form, SHAPE.d_model, SHAPE.d_hidden

        def drawn(*shape: int) -> nn.Parameter:
            value = torch.randn(4, *shape).double()
            is_turned = len(shape) > 1 and (form is None or form.is_transposed)
            return nn.Parameter((value.mT if is_turned else value).contiguous())

        self.up, self.down = drawn(d, h if form is None else 2 * h), drawn(h, d)
        self.factor = drawn(d, h) if form is None else None
        self.up_bias = drawn(2 * h) if bias else None
        self.down_bias = drawn(d) if bias else None

    def layer(self) -> RoutedLayer:
        there = {name: name for name, _ in self.named_parameters()}
        names = ExpertNames(**there)
        experts = BorrowedExperts(self, names, self.form, ExpertPlacement.of(OneRank(), 4))
        return RoutedLayer(SHAPE, experts, OneRank())

    def hidden(self, x: torch.Tensor, e: int) -> torch.Tensor:
        functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "silu": nn.functional.silu, "gelu": nn.functional.gelu, "relu": torch.relu,
            "gelu_tanh": lambda g: nn.functional.gelu(g, approximate="tanh"),
        }  # fmt: skip
        form = self.form
        if form is None:
            assert self.factor is not None
            return nn.functional.silu(x @ self.up[e].T) * (x @ self.factor[e].T)
        up = self.up[e].T if form.is_transposed else self.up[e]
        both = x @ up + (0 if self.up_bias is None else self.up_bias[e])
        g, u = (both[:, ::2], both[:, 1::2]) if form.is_interleaved else both.chunk(2, dim=1)
        if form.clamped is None:
            return functions[form.function](g) * u
        limit = form.clamped.limit
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        return (u + 1) * g * torch.sigmoid(form.clamped.alpha * g)

    def dense(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for e in range(4):
            is_turned = self.form is None or self.form.is_transposed
            out = self.hidden(x, e) @ (self.down[e].T if is_turned else self.down[e])
            out = out + (0 if self.down_bias is None else self.down_bias[e])
            y = y + ((experts == e) * weights).sum(1, keepdim=True) * out
        return y


def inputs() -> tuple[torch.Tensor, ...]:
    """Return x, the gradient of y, weights and choices, of which nobody takes the last expert."""
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(13, 6, generator=generator).double() for _ in range(2))
    weights = torch.rand(13, 2, generator=generator).double()
    return x, dy, weights, torch.rand(13, 3, generator=generator).argsort(1)[:, :2]


def leaves(stack: Stack, *given: torch.Tensor) -> Sequence[torch.Tensor]:
    return [*(each.clone().requires_grad_() for each in given), *stack.parameters()]


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", [None, *FORMS])
def test_every_form_equals_dense(form: FusedForm | None, *, bias: bool, is_grouped: bool) -> None:
    stack = Stack(form, bias=bias and form is not None)
    layer = stack.layer()
    poison(layer)
    x, dy, weights, chosen = inputs()
    wanted = leaves(stack, x, weights)
    y = stack.dense(wanted[0], chosen, wanted[1])
    grads = torch.autograd.grad((y * dy).sum(), wanted)
    strategies: tuple[Strategy, ...] = ("none", "S1", "S4")
    for degree, strategy in itertools.product((1, 3), strategies):
        layer.pin(decision(strategy, degree))
        values = leaves(stack, x, weights)
        with grouped() if is_grouped else nullcontext():
            same = layer(values[0], chosen, values[1])
            made = torch.autograd.grad((same * dy).sum(), values)
        torch.testing.assert_close(same, y, rtol=1e-12, atol=1e-12)
        for grad, expected, parameter in zip(made, grads, values, strict=True):
            torch.testing.assert_close(grad, expected, rtol=1e-11, atol=1e-11)
            assert grad.is_contiguous() == parameter.is_contiguous()


def test_gradients_of_wider_parameters_are_laid_out_as_these() -> None:
    stack = Stack(None).float()
    layer = stack.layer()
    layer.pin(decision(degree=3))
    x, dy, weights, chosen = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x.float().requires_grad_(), chosen, weights.float())
    made = torch.autograd.grad((y * dy.float()).sum(), list(stack.parameters()))
    exact = Stack(None)
    dense = (exact.dense(x, chosen, weights) * dy).sum()
    wanted = torch.autograd.grad(dense, list(exact.parameters()))
    for grad, other in zip(made, wanted, strict=True):
        assert grad.dtype == torch.float32
        assert grad.is_contiguous()
        assert (grad - other).norm() < 0.02 * other.norm()


class Peer(OneRank):
    """A replica whose gradients are all 1."""

    members = (0, 1)

    def all_reduce(self, values: torch.Tensor, name: str, *, op: ReduceOp = "sum") -> Transfer:
        values += 1
        return super().all_reduce(values, name, op=op)


@pytest.mark.parametrize("form", [None, FORMS[1]])
def test_replicas_of_experts_are_averaged_however_their_matrices_lie(
    form: FusedForm | None,
) -> None:
    stack = Stack(form)
    layer, (x, dy, weights, chosen) = stack.layer(), inputs()
    wanted = torch.autograd.grad((layer(x, chosen, weights) * dy).sum(), list(stack.parameters()))
    layer.experts.gradients = GradientMean(replicas=Peer())
    (layer(x, chosen, weights) * dy).sum().backward()
    for parameter, grad in zip(stack.parameters(), wanted, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, (grad + 1) / 2)


def test_gradients_of_a_fused_layer_pass_gradcheck_where_nothing_is_clamped() -> None:
    stack = Stack(FORMS[4], bias=True)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.mul_(0.05)
    layer = stack.layer()
    layer.pin(decision(degree=2))
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    chosen = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 3], [0, 2]])
    weights = torch.full((5, 2), 0.5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: layer(x, chosen, w), (x.requires_grad_(), weights))


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize(("degree", "strategy"), [(1, "none"), (4, "none"), (4, "S1"), (4, "S4")])
def test_halves_need_no_more_memory_than_three_matrices(
    degree: int, strategy: Strategy, *, is_grouped: bool
) -> None:
    fused = Stack(FusedForm(is_transposed=True)).layer()
    apart = MoELayer(6, 10, 4, 2, activation="swiglu", dtype=torch.float64)
    x, dy = torch.randn(2, 512, 6, dtype=torch.float64)
    x.requires_grad_()
    routing = apart.gate(x)
    for layer in (fused, apart):
        layer.pin(decision(strategy, degree))
    with grouped() if is_grouped else nullcontext():
        with HostMemory() as of_fused, live_tensors() as fused_live:
            fused(x, routing.experts_TK, routing.weights_TK.detach()).backward(dy)
        x.grad = None
        with HostMemory() as of_apart, live_tensors() as apart_live:
            apart(x).backward(dy)
    assert 0 < fused_live.peak_bytes <= apart_live.peak_bytes
    assert of_fused.peak_bytes == of_apart.peak_bytes
