"""Values in 8 bits against the definition of e4m3, and products against float64."""

import itertools

import pytest
import torch

from moetune.domain.quantization import FORMATS, Format, packed_width
from moetune.formats.grouped import Padding, multiply_groups, multiply_transposed, round_rows
from moetune.formats.scaled import pack, quantize, tiled, unpack

RELATIVE, OF_LARGEST = 2.0**-4, 2.0**-17
ROWS_G = (5, 0, 37, 1)
ENDS_G = torch.tensor(list(itertools.accumulate(ROWS_G)), dtype=torch.int32)
E4M3 = sorted({
    (1 + m / 8) * 2.0 ** (e - 7) if e else m / 8 * 2.0**-6
    for e in range(16) for m in range(8) if (e, m) != (15, 7)
})  # fmt: skip


def badly_scaled(num_rows: int, width: int) -> torch.Tensor:
    """Rows from 1e-9 to 1e9, with columns from 1e-3 to 1e3."""
    rows, columns = torch.logspace(-9, 9, num_rows), torch.logspace(-3, 3, width)
    return torch.randn(num_rows, width) * rows[torch.randperm(num_rows)].unsqueeze(1) * columns


def largest(x: torch.Tensor, form: Format) -> torch.Tensor:
    """The largest magnitude among the values that share a scale, for each value."""
    block = 32 if form == "mxfp8" else x.shape[-1]
    each: torch.Tensor = x.abs().unflatten(-1, (-1, block)).amax(-1, keepdim=True)
    return each.expand(*each.shape[:-1], block).flatten(-2)


def bound(x: torch.Tensor, form: Format) -> torch.Tensor:
    return RELATIVE * x.abs() + OF_LARGEST * largest(x, form)


@pytest.mark.parametrize("form", FORMATS)
def test_values_are_the_nearest_of_e4m3_under_their_scale(form: Format) -> None:
    torch.manual_seed(0)
    x = badly_scaled(20, 64)
    made = quantize(x, form)
    found = made.dequantize(torch.float32)
    scales = made.scales.repeat_interleave(64 // made.scales.shape[1], 1)
    table = torch.tensor(E4M3)
    nearest = (x.abs() / scales).unsqueeze(-1).sub(table).abs().amin(-1)
    torch.testing.assert_close((found - x).abs() / scales, nearest, rtol=0, atol=1e-5)
    assert ((found - x).abs() <= bound(x, form)).all()
    assert (largest(x, form) / scales > 224).all()
    assert (largest(x, form) / scales <= 448).all()
    assert (torch.frexp(scales).mantissa == 0.5).all()


@pytest.mark.parametrize("form", FORMATS)
def test_rounding_twice_is_rounding_once_and_the_wire_changes_nothing(form: Format) -> None:
    torch.manual_seed(0)
    made = quantize(badly_scaled(20, 64).bfloat16(), form)
    once = made.dequantize(torch.bfloat16)
    assert torch.equal(made.dequantize(torch.float64), once.double())
    assert torch.equal(quantize(once, form).dequantize(torch.bfloat16), once)
    packed = pack(made)
    assert packed.shape == (20, packed_width(64, form))
    assert packed_width(64, form) == 80
    assert torch.equal(unpack(packed, 64, form).dequantize(torch.bfloat16), once)


def test_what_is_not_finite_does_not_become_finite() -> None:
    x = torch.tensor([[1.0, torch.inf], [torch.nan, 1.0], [0.0, 0.0], [-3.0, 448.0]])
    made = quantize(x, "fp8_rowwise")
    for found in (made, unpack(pack(made), 2, "fp8_rowwise")):
        values = found.dequantize(torch.float32)
        assert values[:2].isnan().all()
        assert torch.equal(values[2:], x[2:])


def test_scales_are_tiled_as_tensor_cores_read_them() -> None:
    scales = torch.exp2(torch.randint(-9, 9, (2, 256, 6)).float())
    found = tiled(scales).float()
    for matrix, row, column in itertools.product(range(2), range(256), range(6)):
        tile = row // 128 * 2 + column // 4
        place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        assert found[matrix, place] == scales[matrix, row, column]
    assert found.shape == (2, 256 * 8)


@pytest.mark.parametrize("form", FORMATS)
def test_products_of_groups_are_within_the_error_of_their_factors(form: Format) -> None:
    torch.manual_seed(0)
    x, w = badly_scaled(43, 64), badly_scaled(4 * 48, 64).view(4, 48, 64)
    padding = Padding.of(ENDS_G, [5, 37, 1], form)
    rows = round_rows(x, padding, form)
    found = multiply_groups(rows, quantize(w, form), padding, x.dtype, emulate=True)
    owner = torch.arange(4).repeat_interleave(torch.tensor(ROWS_G))
    exact = torch.einsum("rk,rnk->rn", x.double(), w.double()[owner])
    dx, dw = bound(x, form).double(), bound(w, form).double()[owner]
    most = torch.einsum("rk,rnk->rn", x.abs().double() + dx, dw)
    most += torch.einsum("rk,rnk->rn", dx, w.abs().double()[owner])
    error = (found - exact).abs()
    assert (error <= 1.001 * most).all()
    assert error.norm() > 1e-3 * exact.norm()  # they were rounded


def test_transposed_products_are_within_the_error_of_their_factors() -> None:
    torch.manual_seed(0)
    x, y = badly_scaled(43, 32), badly_scaled(43, 16)
    padding = Padding.of(ENDS_G, ROWS_G, "fp8_rowwise")
    found = multiply_transposed(x, y, padding, emulate=True)
    low = 0
    for group, rows in enumerate(ROWS_G):
        mine = slice(low, low + rows)
        low += rows
        if not rows:
            assert not found[group].any()
            continue
        left, right = x[mine].T, y[mine].T
        dx, dy = bound(left, "fp8_rowwise").double(), bound(right, "fp8_rowwise").double()
        most = (left.abs() + dx) @ dy.T + dx @ right.abs().T.double()
        exact = left.double() @ right.T.double()
        assert ((found[group] - exact).abs() <= 1.001 * most).all()
