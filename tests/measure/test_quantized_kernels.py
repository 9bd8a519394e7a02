"""Products and rounding in 8 bits, measured by themselves: emulated where there is no kernel."""

import pytest

from moetune.domain.errors import InputError
from moetune.domain.samples import GemmPoint, RowsPoint
from moetune.measure.device import CpuDevice
from moetune.measure.expert_kernels import gemm, memory_bound_op
from moetune.measure.point_memory import memory_bytes

FORMS = ("fp8_rowwise", "mxfp8")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", ["quantize", "quantize_matrix", "quantize_wire"])
def test_rounding_runs_where_it_is_emulated_and_is_refused_elsewhere(form: str, op: str) -> None:
    point = RowsPoint(op=op, dtype=f"{form}_emulated", rows=8, width=64)
    memory_bound_op(point, CpuDevice())()
    assert memory_bytes(point) > 0
    with pytest.raises(InputError, match="need an NVIDIA GPU") as caught:
        memory_bound_op(RowsPoint(op=op, dtype=form, rows=8, width=64), CpuDevice())
    assert f"{form}+emulate" in caught.value.hint


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("product", ["forward", "grad_input", "grad_weight"])
def test_products_run_where_they_are_emulated_and_are_refused_elsewhere(
    form: str, product: str
) -> None:
    sizes = {"product": product, "num_experts": 2, "rows": 128, "d_in": 64, "d_out": 32}
    gemm(GemmPoint(dtype=f"{form}_emulated", **sizes), CpuDevice())()  # type: ignore[arg-type]
    with pytest.raises(InputError, match="need an NVIDIA GPU"):
        gemm(GemmPoint(dtype=form, **sizes), CpuDevice())  # type: ignore[arg-type]
