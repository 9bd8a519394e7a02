"""Kernels of the experts: each against dense float64, and a missing one refused by name."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from moetune.domain.errors import InputError
from moetune.domain.kernels import ExpertKernel
from moetune.domain.layer import Activation, LayerShape
from moetune.runtime.moe import expert_kernels
from moetune.runtime.moe.activations import FusedForm
from moetune.runtime.moe.layer import MoELayer
from tests.runtime import test_borrowed
from tests.runtime.gpu_runs import decision
from tests.runtime.poison import poison
from tests.runtime.reference import Weights, dense_moe
from tests.runtime.test_borrowed import Stack

_LIGER = pytest.mark.skipif(
    not (find_spec("liger_kernel") and find_spec("triton")),
    reason="liger-kernel and triton are not installed",
)
KERNELS = ("loop", "grouped_mm", pytest.param("liger", marks=_LIGER))
STEPS = (decision("none", 1), decision("none", 3), decision("S4", 3))
TOLERANCE = 2e-6
"""Of float32 results and gradients, relative to the largest, for every kernel."""
SHAPE = LayerShape(d_model=8, d_hidden=12, num_experts=4, top_k=2, activation="swiglu")


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let Triton's interpreter run kernels on a CPU: it is asked when they are loaded."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("LIGER_FUSED_MOE_AUTOTUNE", "0")
    expert_kernels.liger_package.cache_clear()
    yield
    expert_kernels.liger_package.cache_clear()


def check(made: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    for value, exact in zip(made, wanted, strict=True):
        assert value.dtype == torch.float32
        assert (value - exact).abs().max() <= TOLERANCE * exact.abs().max()


@pytest.mark.parametrize("form", [None, FusedForm(), FusedForm(is_transposed=True)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_borrowed_experts_with_a_kernel_equal_dense(
    kernel: ExpertKernel, form: FusedForm | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_borrowed, "SHAPE", SHAPE)
    exact = Stack(form)
    stack = copy.deepcopy(exact).float()
    generator = torch.Generator().manual_seed(1)
    x, dy = torch.randn(2, 130, 8, generator=generator).double()  # more than a tile of an expert
    weights = torch.rand(130, 2, generator=generator).double()
    chosen = torch.rand(130, 3, generator=generator).argsort(1)[:, :2]  # never the last expert
    wanted = [*(each.requires_grad_() for each in (x, weights)), *exact.parameters()]
    y = exact.dense(x, chosen, weights)
    grads = torch.autograd.grad((y * dy).sum(), wanted)
    layer = stack.layer()
    poison(layer)
    for step in STEPS:
        layer.pin(replace(step, kernel=kernel))
        inputs = [each.detach().float().requires_grad_() for each in (x, weights)]
        same = layer(inputs[0], chosen, inputs[1])
        made = torch.autograd.grad((same * dy.float()).sum(), [*inputs, *stack.parameters()])
        check([same, *made], [y, *grads])


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_layer_with_a_kernel_equals_dense(kernel: ExpertKernel, activation: Activation) -> None:
    torch.manual_seed(0)
    layer = MoELayer(8, 12, 4, 2, activation=activation, expert_kernel=kernel)
    exact = [parameter.detach().double().requires_grad_() for parameter in layer.parameters()]
    names = [name.rpartition(".")[2] for name, _ in layer.named_parameters()]
    by_name = dict(zip(names, exact, strict=True))
    weights = Weights(
        gate=by_name["weight"], w1=by_name["w1"], b1=by_name.get("b1"), w2=by_name["w2"],
        b2=by_name.get("b2"), w3=by_name.get("w3"),
    )  # fmt: skip
    x = torch.randn(40, 8)
    options = {"top_k": 2, "normalize": True, "capacity_factor": None}
    y, _, _ = dense_moe(x.double(), weights, activation=activation, **options)  # type: ignore[arg-type] # of the options
    grads = torch.autograd.grad(y.sum(), exact)
    for step in STEPS:
        layer.pin(step)
        same = layer(x)
        check([same, *torch.autograd.grad(same.sum(), list(layer.parameters()))], [y, *grads])
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))  # once its kernel is loaded


def _install(folder: Path, version: str) -> None:
    """Make Python's metadata say that a version of liger-kernel is installed."""
    info = folder / f"liger_kernel-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: liger-kernel\nVersion: {version}\n"
    )


def test_a_kernel_that_cannot_run_is_refused_by_name_and_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(kernel: ExpertKernel, width: int = 8, dtype: torch.dtype = torch.float32) -> str:
        expert_kernels.liger_package.cache_clear()
        layer = MoELayer(width, 8, 2, expert_kernel=kernel, dtype=dtype)
        with pytest.raises(InputError) as caught:
            layer(torch.ones(3, width, dtype=dtype))
        return str(caught.value)

    with pytest.raises(InputError, match="expert_kernel 'grouped_nm' is unknown"):
        MoELayer(8, 8, 2, expert_kernel="grouped_nm")  # type: ignore[arg-type] # it is wrong
    assert "multiples of 16 bytes, not (6, 8) of float32" in refused("grouped_mm", width=6)
    assert "no float64 on cpu" in refused("grouped_mm", dtype=torch.float64)
    if not find_spec("liger_kernel"):
        assert "liger-kernel is not installed: pip install 'liger-kernel>=0.8.3'" in refused(
            "liger"
        )
    elif find_spec("triton"):
        assert "interpreter multiplies no bfloat16" in refused("liger", dtype=torch.bfloat16)
    monkeypatch.syspath_prepend(str(tmp_path))
    _install(tmp_path, "0.8.2")
    assert "liger-kernel 0.8.2 is installed, 0.8.3 or newer is needed" in refused("liger")
