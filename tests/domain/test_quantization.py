from types import SimpleNamespace
from typing import Any

import pytest

from moetune.domain.constraint_texts import decode_constraints
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.quantization import (
    FORMATS,
    MEASURED_DTYPES,
    Quantization,
    measured_dtype,
    measured_format,
)
from moetune.domain.request import PlanRequest, default_dtype


def test_a_name_is_a_recipe() -> None:
    rowwise, mx = Quantization.of("fp8_rowwise"), Quantization.of("mxfp8")
    assert rowwise is not None
    assert rowwise.products == ("fp8_rowwise",) * 3
    assert mx is not None
    assert mx.products == ("mxfp8", "mxfp8", None)
    assert mx.formats == ("mxfp8",)
    assert rowwise.dispatch is mx.dispatch is None


def test_nothing_is_quantized_by_a_recipe_without_formats() -> None:
    assert Quantization.of(None) is None
    assert Quantization.of("none") is None
    assert Quantization.of(Quantization(emulate=True)) is None
    mine = Quantization(dispatch="fp8_rowwise")
    assert Quantization.of(mine) is mine


@pytest.mark.parametrize(
    ("field", "form", "text"),
    [
        ("forward", "fp4", "format 'fp4' of forward is unknown"),
        ("grad_weights", "mxfp8", "grad_weights are not available in mxfp8"),
    ],
)
def test_what_is_not_available_is_refused(field: str, form: str, text: str) -> None:
    with pytest.raises(InputError, match=text):
        Quantization(**{field: form})  # type: ignore[arg-type] # a wrong one is the point
    with pytest.raises(InputError, match="'int4', which is unknown"):
        Quantization.of("int4")


@pytest.mark.parametrize(
    ("text", "shortest"),
    [
        ("fp8_rowwise", "fp8_rowwise"),
        ("mxfp8+emulate", "mxfp8+emulate"),
        ("emulate+fp8_rowwise+dispatch=mxfp8", "fp8_rowwise+dispatch=mxfp8+emulate"),
        ("forward=mxfp8+grad_input=mxfp8", "mxfp8"),
        ("forward=mxfp8+grad_weights=fp8_rowwise", "forward=mxfp8+grad_weights=fp8_rowwise"),
        ("dispatch=fp8_rowwise", "dispatch=fp8_rowwise"),
    ],
)
def test_a_recipe_has_one_shortest_text(text: str, shortest: str) -> None:
    recipe = Quantization.of(text)
    assert str(recipe) == shortest
    assert Quantization.of(shortest) == recipe


@pytest.mark.parametrize("text", ["", "none", "emulate"])
def test_without_a_format_nothing_is_quantized(text: str) -> None:
    assert Quantization.of(text) is None


@pytest.mark.parametrize("wrong", ["fp8", "wire=mxfp8", "dispatch=fp4", "dispatch", "mxfp8+", "+"])
def test_a_text_with_an_unknown_part_is_refused(wrong: str) -> None:
    with pytest.raises(InputError, match="which is unknown"):
        Quantization.of(wrong)


def test_measured_points_of_emulated_products_have_a_name_of_their_own() -> None:
    names = [measured_dtype(form, emulate=emulate) for form in FORMATS for emulate in (False, True)]
    assert sorted(names) == sorted(MEASURED_DTYPES)
    assert [measured_format(name) for name in names] == [
        ("fp8_rowwise", False), ("fp8_rowwise", True), ("mxfp8", False), ("mxfp8", True),
    ]  # fmt: skip
    assert measured_format("bfloat16") is None


def test_widths_are_multiples_of_what_kernels_take() -> None:
    Quantization(forward="fp8_rowwise").check_widths(d_model=48, d_hidden=64)
    with pytest.raises(InputError, match=r"d_model \(48\) is no multiple of 32, as mxfp8"):
        Quantization(dispatch="mxfp8").check_widths(d_model=48, d_hidden=64)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dtype": "float32"}, "8-bit products give bfloat16, the step is in float32"),
        ({"expert_parallel": "tensor"}, "not available in a tensor-parallel group"),
        ({"quantization": "fp8"}, "which is unknown"),
    ],
)
def test_a_workload_refuses_a_recipe_that_its_layer_cannot_have(
    changes: dict[str, Any], text: str
) -> None:
    layer = LayerShape(d_model=64, d_hidden=64, num_experts=4)
    sizes: dict[str, Any] = {"layer": layer, "world_size": 2, "tokens_per_rank": 8}
    given = {"dtype": "bfloat16", "quantization": "mxfp8", **changes}
    with pytest.raises(InputError, match=text):
        Workload(**sizes, **given)
    assert Workload(**sizes, dtype="bfloat16", quantization="mxfp8").key.quantization == "mxfp8"


@pytest.mark.parametrize(
    ("constraints", "text"),
    [
        ({"quantization": "mxfp8", "strategy": "S1"}, "S1 excludes --quantization"),
        ({"quantization": "mxfp8", "expert-parallel": "tensor"}, "tensor excludes"),
        ({"quantization": "mxfp8", "num-layers": "2", "num-heads": "2", "seq": "8", "vocab": "9"},
         "is for one layer"),
    ],
)  # fmt: skip
def test_pins_that_quantized_experts_do_not_have_are_refused(
    constraints: dict[str, str], text: str
) -> None:
    layer = LayerShape(d_model=64, d_hidden=64, num_experts=4)
    pins = decode_constraints(constraints)
    with pytest.raises(InputError, match=text):
        PlanRequest(layer=layer, tokens_per_rank=64, constraints=pins)


def test_plans_refuse_a_format_by_name_and_never_take_it_for_a_dtype() -> None:
    layer = LayerShape(d_model=64, d_hidden=64, num_experts=4)
    with pytest.raises(InputError, match="plan with --quantization mxfp8"):
        PlanRequest(layer=layer, tokens_per_rank=64, dtype="mxfp8")
    lines = [SimpleNamespace(dtype=one) for one in ("fp8_rowwise", "float16")]
    cuda = SimpleNamespace(kind="cuda")
    profile = SimpleNamespace(gemm=lines, samples=(), tables=(), machine=cuda)
    assert default_dtype(profile) == "float16"  # type: ignore[arg-type] # has what is asked for
