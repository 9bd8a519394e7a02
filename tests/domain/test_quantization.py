"""Narrow formats of whole models' GEMMs are no dtypes of a step."""

from types import SimpleNamespace

import pytest

from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.domain.quantization import NARROW, check_product_dtype
from moetune.domain.request import PlanRequest, default_dtype


def test_gemms_have_dtypes_and_narrow_formats() -> None:
    for dtype in (*NARROW, "bfloat16"):
        check_product_dtype(dtype)
    with pytest.raises(InputError, match="int4"):
        check_product_dtype("int4")


def test_a_layers_step_is_in_no_narrow_format() -> None:
    layer = LayerShape(d_model=64, d_hidden=64, num_experts=4)
    lines = [SimpleNamespace(dtype=one) for one in ("fp8_rowwise", "float16")]
    cuda = SimpleNamespace(kind="cuda")
    profile = SimpleNamespace(gemm=lines, samples=(), tables=(), machine=cuda)
    assert default_dtype(profile) == "float16"  # type: ignore[arg-type] # has what is asked for
    assert PlanRequest(layer=layer, tokens_per_rank=64, dtype="float16").dtype == "float16"
