"""The layer on one CUDA device, over the host-staged loopback link."""

import copy
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import moetune
from benchmarks.staged_link import HostStagedLink
from moetune.comm.group import OneRank
from moetune.domain.constraints import STRATEGIES, Strategy
from moetune.domain.errors import AllocationError
from moetune.domain.kernels import EXPERT_KERNELS, ExpertKernel
from moetune.domain.layer import LayerShape
from moetune.runtime.moe.activations import FusedForm
from moetune.runtime.moe.expert_kernels import kernel_problem
from moetune.runtime.moe.layer import MoELayer, RoutedLayer, TensorExpertLayer
from tests.runtime import test_borrowed
from tests.runtime.gpu_runs import decision
from tests.runtime.workers import relative_error, results_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


_run = partial(results_of, balance=0.1)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "swiglu"])
@pytest.mark.parametrize("capacity_factor", [None, 0.7])
def test_cuda_equals_cpu_in_float64_at_every_degree(
    activation: str, capacity_factor: float | None
) -> None:
    torch.manual_seed(0)
    layer = MoELayer(
        32, 64, 8, 2, activation=activation, capacity_factor=capacity_factor,  # type: ignore[arg-type]  # the grid holds plain strings
        dtype=torch.float64, communicator=OneRank(),
    )  # fmt: skip
    x, dy = torch.randn(2, 301, 32, dtype=torch.float64)
    wanted = _run(layer, x, dy)
    on_device = MoELayer(
        32, 64, 8, 2, activation=activation, capacity_factor=capacity_factor,  # type: ignore[arg-type]  # as above
        dtype=torch.float64, device=CUDA, communicator=HostStagedLink(CUDA),
    )  # fmt: skip
    on_device.load_state_dict(layer.state_dict())
    for degree in (1, 2, 3, 8):
        on_device.pin(decision(degree=degree))
        results = _run(on_device, x.to(CUDA), dy.to(CUDA))
        for value, expected in zip(results, wanted, strict=True):
            assert relative_error(value.cpu(), expected) <= 1e-12


def test_cuda_sums_wait_for_their_chunk_and_equal_the_cpu() -> None:
    torch.manual_seed(0)
    layer = MoELayer(32, 64, 8, 2, dtype=torch.float64, communicator=OneRank())
    x, dy = torch.randn(2, 301, 32, dtype=torch.float64)
    wanted = _run(layer, x, dy)
    on_device = TensorExpertLayer(
        32, 64, 8, 2, dtype=torch.float64, device=CUDA, communicator=HostStagedLink(CUDA)
    )
    on_device.load_state_dict(layer.state_dict())
    for degree in (1, 2, 3, 8):
        on_device.pin(decision(degree=degree))
        results = _run(on_device, x.to(CUDA), dy.to(CUDA))
        for value, expected in zip(results, wanted, strict=True):
            assert relative_error(value.cpu(), expected) <= 1e-12


def _need(kernel: ExpertKernel) -> None:
    problem = kernel_problem(kernel, device=CUDA, dtype=torch.bfloat16, widths=(64, 128))
    if problem:
        pytest.skip(problem)


@pytest.mark.parametrize("kernel", EXPERT_KERNELS)
def test_bfloat16_products_agree_with_float32_experts_without_tokens_included(
    kernel: ExpertKernel,
) -> None:
    _need(kernel)
    torch.manual_seed(0)
    exact = MoELayer(64, 128, 8, 2, device=CUDA, communicator=OneRank())
    # Rounded before both layers see them: else ties of the gate's logits, which rounding decides,
    # send some tokens to other experts.
    with torch.no_grad():
        exact.gate.weight[5] = -10
        exact.gate.weight.copy_(exact.gate.weight.bfloat16())
    x, dy = torch.rand(2, 512, 64, device=CUDA).bfloat16().float()
    wanted = _run(exact, x, dy)
    rounded = MoELayer(
        64, 128, 8, 2, device=CUDA, dtype=torch.bfloat16, communicator=OneRank(),
        expert_kernel=kernel,
    )  # fmt: skip
    rounded.load_state_dict(exact.state_dict())
    results = _run(rounded, x.bfloat16(), dy.bfloat16())
    for value, expected in zip(results, wanted, strict=True):
        assert relative_error(value.float(), expected) <= 0.02


@pytest.mark.parametrize("kernel", EXPERT_KERNELS)
def test_fused_experts_in_bfloat16_agree_with_dense_float64(
    kernel: ExpertKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _need(kernel)
    shape = LayerShape(d_model=64, d_hidden=128, num_experts=4, top_k=2, activation="swiglu")
    monkeypatch.setattr(test_borrowed, "SHAPE", shape)
    exact = test_borrowed.Stack(FusedForm(is_transposed=True))
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_((parameter / 8).bfloat16())
    stack = copy.deepcopy(exact).to(CUDA, torch.bfloat16)
    x, dy = torch.randn(2, 512, 64, dtype=torch.float64).bfloat16().double()
    weights = torch.rand(512, 2, dtype=torch.float64).bfloat16().double()
    chosen = torch.rand(512, 3).argsort(1)[:, :2]  # never the last expert
    wanted = [x.requires_grad_(), weights.requires_grad_(), *exact.parameters()]
    y = exact.dense(x, chosen, weights)
    grads = torch.autograd.grad((y * dy).sum(), wanted)
    layer = stack.layer()
    for degree in (1, 3):
        layer.pin(replace(decision(degree=degree), kernel=kernel))
        inputs = [each.detach().to(CUDA, torch.bfloat16).requires_grad_() for each in (x, weights)]
        same = layer(inputs[0], chosen.to(CUDA), inputs[1])
        loss = (same * dy.to(CUDA, torch.bfloat16)).sum()
        made = [same, *torch.autograd.grad(loss, [*inputs, *stack.parameters()])]
        for value, expected in zip(made, [y, *grads], strict=True):
            assert relative_error(value.double().cpu(), expected) <= 0.02


def test_repeated_steps_give_the_same_bits_whatever_the_allocator_does_between() -> None:
    torch.manual_seed(0)
    layer = MoELayer(256, 512, 4, device=CUDA, communicator=HostStagedLink(CUDA), pipeline=8)
    x, dy = torch.randn(2, 4096, 256, device=CUDA)
    first = [value.clone() for value in _run(layer, x, dy)]
    for size in (1, 2**20, 2**24):
        garbage = torch.full((size,), float("nan"), device=CUDA)
        del garbage
        for value, other in zip(_run(layer, x, dy), first, strict=True):
            assert torch.equal(value, other)


def test_memory_does_not_grow_over_steps() -> None:
    layer = MoELayer(256, 512, 4, device=CUDA, communicator=HostStagedLink(CUDA), pipeline=4)
    x, dy = torch.randn(2, 4096, 256, device=CUDA)
    peaks = []
    for _ in range(4):
        torch.cuda.reset_peak_memory_stats()
        _run(layer, x, dy)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[-1] <= peaks[1]


def test_deep_copy_of_the_layer_runs() -> None:
    layer = MoELayer(16, 32, 2, device=CUDA, communicator=OneRank())
    x = torch.randn(5, 16, device=CUDA)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_a_layer_is_made_under_the_callers_device() -> None:
    with CUDA:
        layer = MoELayer(16, 32, 4, 2, communicator=OneRank())
    assert {parameter.device.type for parameter in layer.parameters()} == {"cuda"}
    assert _run(layer, *torch.randn(2, 5, 16, device=CUDA))[0].shape == (5, 16)


@pytest.mark.parametrize("degree", [1, 4])
def test_the_host_waits_once_in_a_forward_pass_and_never_in_a_backward_pass(degree: int) -> None:
    layer = MoELayer(
        512, 1024, 16, 2, activation="swiglu", device=CUDA, dtype=torch.bfloat16,
        communicator=HostStagedLink(CUDA), pipeline=degree,
    )  # fmt: skip
    x, dy = torch.randn(2, 4096, 512, device=CUDA).bfloat16()
    for _ in range(3):
        _run(layer, x, dy)
    x = x.detach().requires_grad_()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as forward:
            warnings.simplefilter("always")
            y = layer(x)
        with warnings.catch_warnings(record=True) as backward:
            warnings.simplefilter("always")
            y.backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (len(forward), len(backward)) == (1, 0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_behind_a_step_without_memory_has_the_same_bits(strategy: Strategy) -> None:
    torch.manual_seed(0)
    layer = MoELayer(
        1024, 4096, 8, 2, device=CUDA, dtype=torch.bfloat16, communicator=HostStagedLink(CUDA)
    )
    layer.pin(decision(strategy, 4))
    x, dy = torch.randn(2, 16384, 1024, device=CUDA).bfloat16()
    wanted = [value.clone() for value in _run(layer, x, dy)]
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 2**26) / total)
    try:
        with pytest.raises((AllocationError, torch.OutOfMemoryError)):
            _run(layer, x, dy)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(map(torch.equal, _run(layer, x, dy), wanted))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_adapted_models_of_transformers_equal_the_originals(strategy: Strategy) -> None:
    pytest.importorskip("transformers", minversion="5.20")
    from tests.adapters.tiny_models import FAMILIES, tiny, tokens_of

    for family in FAMILIES:
        model = tiny(family).to(CUDA)
        adapted = moetune.adapt(copy.deepcopy(model))
        for layer in adapted.modules():
            if isinstance(layer, RoutedLayer):
                layer.pin(decision(strategy, 3))
        results, wanted = (_of_model(net, tokens_of(0).to(CUDA)) for net in (adapted, model))
        for value, expected in zip(results, wanted, strict=True):
            assert relative_error(value.cpu(), expected.cpu()) <= 1e-12, family


def _of_model(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    logits = model(input_ids=tokens).logits
    logits.square().mean().backward()
    return [logits.detach(), *(leaf.grad for leaf in model.parameters() if leaf.grad is not None)]
