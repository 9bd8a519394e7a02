from types import SimpleNamespace

import pytest

from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.domain.quantization import Quantization, parse_formats
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
    with pytest.raises(InputError, match="quantization 'int4' is unknown"):
        Quantization.of("int4")


def test_formats_are_parsed() -> None:
    assert parse_formats(["mxfp8", "fp8_rowwise"]) == ("mxfp8", "fp8_rowwise")
    with pytest.raises(InputError, match="format 'fp8' is unknown"):
        parse_formats(["fp8"])


def test_widths_are_multiples_of_what_kernels_take() -> None:
    layer = LayerShape(d_model=48, d_hidden=64, num_experts=4)
    Quantization(forward="fp8_rowwise").check_widths(layer)
    with pytest.raises(InputError, match=r"d_model \(48\) is no multiple of 32, as mxfp8"):
        Quantization(dispatch="mxfp8").check_widths(layer)


def test_plans_refuse_a_format_by_name_and_never_take_it_for_a_dtype() -> None:
    layer = LayerShape(d_model=64, d_hidden=64, num_experts=4)
    with pytest.raises(InputError, match="plans do not know experts in mxfp8 yet"):
        PlanRequest(layer=layer, tokens_per_rank=64, dtype="mxfp8")
    lines = [SimpleNamespace(dtype=one) for one in ("fp8_rowwise", "float16")]
    cuda = SimpleNamespace(kind="cuda")
    profile = SimpleNamespace(gemm=lines, samples=(), tables=(), machine=cuda)
    assert default_dtype(profile) == "float16"  # type: ignore[arg-type] # has what is asked for
