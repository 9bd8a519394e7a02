"""Layers with experts in 8 bits: numerics by emulation, the kernels' rules on a fake GPU."""

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moetune
from moetune.domain.errors import InputError
from moetune.domain.layer import Activation, LayerShape
from moetune.domain.plan import SAFE_DECISION
from moetune.domain.quantization import Quantization
from moetune.runtime.plans.book import PlanBook
from tests.cuda_kit import FakeCuda, MirrorWorld
from tests.ranks import run_ranks
from tests.runtime.gpu_runs import GPU, decision
from tests.runtime.plans import small_plan
from tests.runtime.quantized_workers import (
    D_MODEL,
    MX,
    ROWWISE,
    dense,
    error,
    layer_of,
    ranks_equal_one_rank,
    run,
)

# A value is rounded to within 2⁻⁴ of itself: less than 2⁻⁴/√3 = 0.036 of it in the mean square.
# Both factors of a product are, and errors of different values add in squares.
OF_A_PRODUCT = (2 / 3) ** 0.5 / 16
PRODUCTS = {"y": 2, "x": 4}
"""Products one after another behind a result; parameters' gradients have 3 or fewer."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["gelu", "silu", "swiglu"])
@pytest.mark.parametrize("recipe", [ROWWISE, MX])
def test_a_step_is_within_the_error_of_the_format(
    recipe: Quantization, activation: Activation, dtype: torch.dtype
) -> None:
    layer = layer_of(recipe, activation, dtype, pipeline=3)
    torch.manual_seed(0)
    x, grad = torch.randn(2, 60, D_MODEL).to(dtype)
    found, wanted = run(layer, x, grad), dense(layer, x, grad)
    assert found.keys() == wanted.keys()
    for name, exact in wanted.items():
        limit = (PRODUCTS.get(name, 3) + (activation == "swiglu")) ** 0.5 * OF_A_PRODUCT
        assert error(found[name], exact) < limit, name
    assert error(found["y"], wanted["y"]) > 0.02  # it was rounded


def test_rows_of_any_scale_keep_their_relative_error() -> None:
    layer = layer_of(ROWWISE, "silu", bias=False)
    torch.manual_seed(0)
    x = torch.randn(40, D_MODEL) * torch.logspace(-6, 3, 40).unsqueeze(1)
    grad = torch.randn(40, D_MODEL)
    found, wanted = run(layer, x, grad)["y"], dense(layer, x, grad)["y"]
    errors = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert errors.max() < 2 * 2**0.5 * OF_A_PRODUCT


def test_experts_without_rows_get_gradients_of_zero() -> None:
    layer = layer_of(ROWWISE)
    torch.manual_seed(0)
    x = torch.rand(20, D_MODEL) + 0.1
    with torch.no_grad():
        layer.gate.weight[:2], layer.gate.weight[2:] = 1.0, -1.0
    found = run(layer, x, torch.randn(20, D_MODEL))
    for name in ("w1", "b1", "w2", "b2"):
        grad = found[f"experts.{name}"]
        assert grad[:2].any()
        assert not grad[2:].any()
    empty = run(layer_of(ROWWISE), torch.zeros(0, D_MODEL), torch.zeros(0, D_MODEL))
    assert empty["y"].shape == (0, D_MODEL)


def test_rows_that_travel_in_the_format_of_the_products_change_no_output() -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(2, 60, D_MODEL).bfloat16()
    packed = dataclasses.replace(ROWWISE, dispatch="fp8_rowwise")
    one, other = (run(layer_of(r, dtype=torch.bfloat16), x, grad) for r in (ROWWISE, packed))
    for name in ("y", "x"):
        assert torch.equal(one[name], other[name])
    wire_only = Quantization(dispatch="fp8_rowwise")
    layers = (layer_of(one, dtype=torch.float64) for one in (wire_only, None))
    found, exact = (run(each, x.double(), grad.double())["y"] for each in layers)
    assert 0.01 < error(found, exact) < OF_A_PRODUCT  # any device has the wire alone


def test_ranks_give_what_one_rank_gives() -> None:
    assert run_ranks(ranks_equal_one_rank, 2) == ["", ""]


class Kernel:
    """torch's scaled grouped kernel: its own checks of shapes, strides and dtypes, then values.

    Groups without rows are left as they are: NaN.
    """

    def __init__(self) -> None:
        self._kernel: Any = torch._scaled_grouped_mm
        self.calls: list[tuple[int, torch.dtype]] = []

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor,
        *, offs: torch.Tensor, out_dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        tensors = (a, b, scale_a, scale_b, offs)
        metas = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors
        ]
        self._kernel(*metas[:4], offs=metas[4], out_dtype=out_dtype)
        self.calls.append((b.dim(), scale_a.dtype))
        padded = a.shape[0] if b.dim() == 3 else a.shape[1]
        owner = torch.searchsorted(offs, torch.arange(padded, device=a.device), right=True)
        left, right = a.float(), b.float()
        if b.dim() == 2:
            mine = owner == torch.arange(len(offs), device=a.device).unsqueeze(1)
            left = left * scale_a.view(len(offs), -1, 1) * mine.unsqueeze(1)
            right = right * scale_b.view(len(offs), 1, -1)
            made = torch.where(mine.any(1).view(-1, 1, 1), left @ right, torch.nan)
            return made.to(out_dtype)
        if scale_a.dtype == torch.float32:
            right = right[owner] * scale_b[owner].unsqueeze(1)
            return torch.einsum("pk,pkn->pn", left * scale_a.unsqueeze(1), right).to(out_dtype)
        left = left * untiled(scale_a.view(1, -1), *left.shape)[0]
        right = right * untiled(scale_b, right.shape[2], right.shape[1]).transpose(1, 2)
        return torch.einsum("pk,pkn->pn", left, right[owner]).to(out_dtype)


def untiled(scales: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """Return the scale of each value: (…, rows, width)."""
    row = torch.arange(rows, device=scales.device).unsqueeze(1)
    column = torch.arange(width, device=scales.device) // 32
    tile = row // 128 * -(-(width // 32) // 4) + column // 4
    return scales.float()[:, tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4]


KERNELS = [
    (dataclasses.replace(ROWWISE, dispatch="fp8_rowwise", emulate=False), (9, 0)),
    (dataclasses.replace(MX, emulate=False), (10, 0)),
]


@pytest.mark.parametrize(("recipe", "capability"), KERNELS)
def test_kernels_get_what_they_want_and_the_host_waits_once(
    recipe: Quantization, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel()
    monkeypatch.setattr(torch, "_scaled_grouped_mm", kernel)
    monkeypatch.setattr(torch.__config__, "show", lambda: "USE_MSLK=1")
    stops = []
    with FakeCuda() as cuda, MirrorWorld(cuda, rank=1) as world:
        see(capability, monkeypatch)
        layer = layer_of(recipe, dtype=torch.bfloat16, device=GPU)
        layer.pin(decision("none", (3, 2)))
        for num_tokens in (24, 24, 17):
            x = torch.randn(num_tokens, D_MODEL).bfloat16().to(GPU).requires_grad_()
            begin = len(cuda.syncs)
            y = layer(x)
            middle = len(cuda.syncs)
            y.sum().backward()
            stops.append((cuda.syncs[begin:middle], cuda.syncs[middle:]))
            for each in (x, *layer.parameters()):
                assert each.grad is not None
                assert each.grad.isfinite().all()
    assert stops[1:] == [(["tolist"], [])] * 2
    is_mx = recipe.forward == "mxfp8"
    scales = torch.float8_e8m0fnu if is_mx else torch.float32
    assert {dims for dims, _ in kernel.calls} == ({3} if is_mx else {2, 3})
    assert {dtype for _, dtype in kernel.calls} == {scales}
    assert sum(dims == 2 for dims, _ in kernel.calls) == (0 if is_mx else 2 * 3)
    sent = [one.kind for one in world.log if one.kind.startswith("all_to_all")]
    # Rows go in bytes and come back in bfloat16.
    assert sum("uint8" in kind for kind in sent) == sum("bfloat16" in kind for kind in sent) == 15


@pytest.mark.parametrize(("recipe", "capability"), KERNELS)
def test_a_kernel_gives_what_is_emulated(
    recipe: Quantization, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(2, 40, D_MODEL).bfloat16()
    emulated = dataclasses.replace(recipe, emulate=True)
    wanted = run(layer_of(emulated, dtype=torch.bfloat16), x, grad)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", Kernel())
    monkeypatch.setattr(torch.__config__, "show", lambda: "USE_MSLK=1")
    with FakeCuda():
        see(capability, monkeypatch)
        layer = layer_of(recipe, dtype=torch.bfloat16).to(GPU)
        found = {name: each.cpu() for name, each in run(layer, x.to(GPU), grad.to(GPU)).items()}
    for name, each in wanted.items():
        assert error(found[name], each) < 1e-2, name


def see(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fake GPUs be of a capability."""
    properties = SimpleNamespace(
        name="a GPU that is none", total_memory=2**34, L2_cache_size=2**20,
        major=capability[0], minor=capability[1],
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _=None: properties)


@pytest.mark.parametrize(
    ("form", "capability", "text"),
    [
        ("fp8_rowwise", (8, 9), "fp8_rowwise experts need a GPU of compute capability 9.0, cuda:1"),
        ("mxfp8", (9, 0), "mxfp8 experts need a GPU of compute capability 10.0, cuda:1 has 9.0"),
        ("mxfp8", (10, 0), "this build of torch has no mxfp8 kernel"),
    ],
)
def test_a_gpu_that_cannot_is_refused_by_name(
    form: str, capability: tuple[int, int], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeCuda():
        see(capability, monkeypatch)
        with pytest.raises(InputError, match=text):
            layer_of(form, dtype=torch.bfloat16, device=GPU)(torch.randn(2, 64).bfloat16().to(GPU))


def test_plans_of_other_experts_are_not_for_quantized_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shape = LayerShape(d_model=D_MODEL, d_hidden=96, num_experts=4, top_k=2)
    plan = small_plan(layer=shape, world_size=1)
    with pytest.raises(InputError, match="is for experts quantized as none") as caught:
        layer_of(ROWWISE, plan=plan)
    assert f"--quantization {ROWWISE}" in caught.value.hint
    x = torch.randn(40, D_MODEL)
    quantized, plain = (layer_of(one, planbook=PlanBook([plan])) for one in (ROWWISE, None))
    plain(x)
    assert plain.decision == plan.decide(40)
    assert not caplog.records
    quantized(x)
    assert quantized.decision == SAFE_DECISION
    assert f"--quantization {ROWWISE}" in caplog.text


def test_a_quantized_layer_runs_a_plan_of_its_recipe_and_no_other() -> None:
    shape = LayerShape(d_model=D_MODEL, d_hidden=96, num_experts=4, top_k=2)
    text = str(ROWWISE)
    plan = small_plan(
        layer=shape, world_size=1, dtype="bfloat16", constraints={"quantization": text}
    )
    layer = layer_of(text, plan=plan, dtype=torch.bfloat16)
    layer(torch.randn(40, D_MODEL, dtype=torch.bfloat16))
    assert layer.decision == plan.decide(40) != SAFE_DECISION
    for other in (None, MX):
        with pytest.raises(InputError, match=f"is for experts quantized as {re.escape(text)}"):
            layer_of(other, plan=plan, dtype=torch.bfloat16)


def test_what_is_not_possible_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"need an NVIDIA GPU, x is on cpu: .*emulate=True"):
        layer_of("fp8_rowwise")(torch.randn(2, D_MODEL))
    with pytest.raises(InputError, match=r"emulated in float32, the step is torch\.float64"):
        layer_of(ROWWISE, dtype=torch.float64)(torch.randn(2, D_MODEL).double())
    with (
        FakeCuda(),
        pytest.raises(
            InputError, match=r"8-bit products give bfloat16, the step is torch\.float32"
        ),
    ):
        layer_of("fp8_rowwise", device=GPU)(torch.randn(2, D_MODEL).to(GPU))
    with pytest.raises(InputError, match="S1 is not available with quantized experts"):
        layer_of(ROWWISE, memory_reuse="S1")
    with pytest.raises(InputError, match="S4 is not available with quantized experts"):
        layer_of(ROWWISE).pin(decision("S4"))
    with pytest.raises(InputError, match="no multiple of 16"):
        moetune.MoELayer(24, 32, 2, quantization="fp8_rowwise")
    with pytest.raises(InputError, match="not available in a tensor-parallel group"):
        moetune.TensorExpertLayer(32, 32, 2, quantization="fp8_rowwise")
