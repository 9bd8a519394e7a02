"""Grouped kernels: the numbers of the dense reference, and no stop of the host but one."""

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.mpipemoe.memory import measure_step
from moetune.domain.constraints import Strategy
from moetune.domain.layer import Activation, LayerShape, Workload
from moetune.runtime.moe import weight_grads
from moetune.runtime.moe.gate import Gate
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.moe.products import has_grouped
from moetune.solve.layer import peak
from moetune.solve.layer.peak import peak_bytes
from tests.cuda_kit import FakeCuda, MirrorWorld
from tests.runtime import grouped_workers
from tests.runtime.gpu_runs import GPU, decision


def test_the_definition_is_what_torch_computes_also_of_empty_groups() -> None:
    offs = torch.tensor([0, 16, 16, 40], dtype=torch.int32)
    x, y = torch.randn(40, 8), torch.randn(40, 16)
    for left, right in ((x, torch.randn(4, 8, 16)), (x.T, y)):
        wanted = grouped_workers.grouped_mm(left, right, offs=offs).nan_to_num(0)
        torch.testing.assert_close(torch._grouped_mm(left, right, offs=offs), wanted)


def test_grouped_kernels_are_taken_where_torch_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(width: int = 16, dtype: torch.dtype = torch.bfloat16) -> bool:
        return has_grouped(torch.ones(3, 16).to(GPU, dtype), (16, width))

    with FakeCuda():
        assert taken()
        assert not taken(width=12)  # whose rows are no multiples of 16 bytes
        assert not taken(dtype=torch.float16)
        older = SimpleNamespace(major=8, minor=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: older)
        assert not taken()
        assert not has_grouped(torch.ones(3, 16).bfloat16(), (16, 16))


class Kernel:
    """torch's grouped kernel, and what was asked of it.

    Attributes:
        matrices: storages of the matrices that it multiplied rows with.
        gradients: collectives that had been issued at each product of rows with rows.
    """

    def __init__(self, world: MirrorWorld) -> None:
        self._world = world
        self._kernel: Any = torch._grouped_mm
        self.matrices: set[int] = set()
        self.gradients: list[int] = []

    def __call__(self, x: torch.Tensor, w: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        if w.dim() == x.dim():
            self.gradients.append(len(self._world.log))
        else:
            self.matrices.add(w.untyped_storage().data_ptr())
        made: torch.Tensor = self._kernel(x, w, offs=offs)
        return made


@pytest.mark.parametrize("degree", [1, 4])
@pytest.mark.parametrize("strategy", ["none", "S1", "S4"])
@pytest.mark.parametrize(("activation", "capacity_factor"), [("gelu", None), ("swiglu", 0.7)])
def test_the_host_waits_once_forward_and_never_backward(
    strategy: Strategy, degree: int, activation: str, capacity_factor: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    with FakeCuda() as cuda, MirrorWorld(cuda, rank=1) as world:
        kernel = Kernel(world)
        monkeypatch.setattr(torch, "_grouped_mm", kernel)
        layer = MoELayer(
            8, 16, 4, 2, activation=activation, capacity_factor=capacity_factor,  # type: ignore[arg-type] # of the grid
            device=GPU, dtype=torch.bfloat16,
        )  # fmt: skip
        layer.pin(decision(strategy, degree))
        stops = []
        for num_tokens in (24, 24, 24, 17):
            kernel.gradients.clear()
            x = torch.randn(num_tokens, 8).bfloat16().to(GPU).requires_grad_()
            begin = len(cuda.syncs)
            y = layer(x)
            middle = len(cuda.syncs)
            y.sum().backward()
            stops.append((cuda.syncs[begin:middle], cuda.syncs[middle:]))
        parameters = {weight.untyped_storage().data_ptr() for weight in layer.experts.parameters()}
    assert stops == [(["a copy"], [])] * 4
    # No matrix was copied, and each has one product when all results are on their way.
    assert kernel.matrices <= parameters
    keeps = strategy == "none" or degree == 1
    num_matrices = (3 if activation == "swiglu" else 2) * keeps
    assert kernel.gradients == [len(world.log)] * num_matrices


@pytest.mark.parametrize("normalize", [False, True])
def test_a_gate_on_tensor_cores_gives_what_float32_gives(*, normalize: bool) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(2, 40, 16).bfloat16()
    gate = MoELayer(16, 8, 8, 2, normalize_topk=normalize, dtype=torch.bfloat16).gate
    twin = copy.deepcopy(gate)

    def run(gate: Gate, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().requires_grad_()
        routing = gate(x)
        loss = (routing.weights_TK * grad[:, :2]).sum() + (routing.x_TD * grad).sum()
        (loss + routing.aux_loss).backward()
        assert x.grad is not None
        assert gate.weight.grad is not None
        outputs = routing.weights_TK.detach(), routing.experts_TK, x.grad, gate.weight.grad
        return [each.to("cpu") for each in outputs]

    wanted = run(gate, x, grad)
    with FakeCuda():
        results = run(twin.to(GPU), x.to(GPU), grad.to(GPU))
    torch.testing.assert_close(results[0], wanted[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(results[1], wanted[1])
    for value, other in zip(results[2:], wanted[2:], strict=True):
        torch.testing.assert_close(value, other, rtol=1.6e-2, atol=1e-4)  # rounded to bfloat16


@pytest.mark.parametrize(("degree", "strategy"), [(1, "none"), (4, "none"), (4, "S4")])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_predicted_peak_has_what_grouped_kernels_make(
    degree: int, strategy: Strategy, activation: Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peak, "_DOT_VALUES", 2**15)  # as a CPU's, which runs here
    shape = LayerShape(d_model=128, d_hidden=384, num_experts=4, top_k=2, activation=activation)
    workload = Workload(layer=shape, world_size=1, tokens_per_rank=4096)
    with grouped_workers.grouped(torch._grouped_mm):
        measured = measure_step(workload, degree, strategy)
    predicted = peak_bytes(
        workload=workload, degree=degree, strategy=strategy,
        bias=False, is_grouped=True,
    )  # fmt: skip
    # Of swiglu the plan counts what one matrix for gate and up takes, as model libraries have it.
    most = 1.2 if activation == "swiglu" else 1.12
    assert 0.97 * measured.live_bytes <= predicted.device_bytes <= most * measured.live_bytes


@pytest.mark.parametrize("num_experts", [1, 4])
def test_gradients_of_float32_parameters_are_one_product_each(
    num_experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer = MoELayer(16, 32, num_experts, pipeline=2)
    x, alone = torch.randn(40, 16), list[object]()

    def run() -> list[torch.Tensor]:
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            layer(x.requires_grad_()).square().sum().backward()
        return [weight.grad for weight in layer.experts.parameters() if weight.grad is not None]

    wanted = run()
    monkeypatch.setattr(weight_grads, "add_product", lambda *_, **__: alone.append(_))
    layer.pin(replace(decision(degree=2), kernel="grouped_mm"))
    made = run()
    assert not alone
    for grad, expected in zip(made, wanted, strict=True):
        assert grad.dtype == torch.float32
        assert float((grad - expected).norm() / expected.norm()) < 0.01


def test_a_pass_makes_few_python_calls_whatever_the_number_of_experts() -> None:
    def num_calls(work: Callable[[], Any]) -> int:
        names = list[str]()
        sys.setprofile(lambda frame, event, _: names.append(event + frame.f_code.co_filename))
        try:
            work()
        finally:
            sys.setprofile(None)
        return len([name for name in names if name.startswith("call") and "/moetune/" in name])

    counts = set()
    for num_experts in (8, 64):
        layer = MoELayer(16, 32, num_experts, 2, activation="swiglu", dtype=torch.bfloat16)
        x = torch.randn(256, 16, dtype=torch.bfloat16, requires_grad=True)
        with grouped_workers.grouped(torch._grouped_mm):
            layer(x)  # the first call looks plans up
            loss = list[torch.Tensor]()
            forward = num_calls(lambda: loss.append(layer(x).sum()))  # noqa: B023 - called at once
            with torch.autograd.set_multithreading_enabled(False):
                backward = num_calls(loss[0].backward)
        counts.add((forward, backward))
    ((forward, backward),) = counts
    assert 50 < forward <= 150
    assert 50 < backward <= 150
