"""Values in e4m3 with scales that are powers of two: made, taken back, and packed for the wire.

A scale brings the largest magnitude of its values into (224, 448], the upper end of e4m3. Rounding
then changes a value v of a block with the largest magnitude m by at most 2⁻⁴·|v| + 2⁻¹⁷·m: three
bits follow the leading one, and the smallest steps, 2⁻⁹, are rounded to within 2⁻¹⁰ scales, where a
scale is below m / 2⁷. A scale is exact in e8m0 and its product with an e4m3 value in bfloat16, so
rounding twice is rounding once. Infinite or NaN values make all values of their scale NaN.

Sources: OCP Microscaling Formats 1.0, §5.2 and §6.3, whose scales round down and clip; here they
round up, as those of NVIDIA's recipe for training in MXFP8 (arXiv:2506.08027, §3).

K is the dimension that a product sums over, B the scales along it.
"""

from dataclasses import dataclass

import torch

from moetune.domain.quantization import MX_BLOCK, Format, packed_width

E4M3 = torch.float8_e4m3fn
_E8M0 = torch.float8_e8m0fnu
_MANTISSA_BITS = 23
_ABOVE_448 = 0x1FFFFF
"""Added to a float32's bits, it carries into the exponent if the significand is above 1.75, and
448 = 1.75·2⁸."""
_INFINITE = 0x7F800000
_EXPONENT_448 = 8
_LARGEST_EXPONENT = 254


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """Values (…, K) times scales (…, B), each for K / B neighbours.

    Args:
        values: e4m3, contiguous.
        scales: float32, powers of two or NaN.
    """

    values: torch.Tensor
    scales: torch.Tensor

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return (…, K); exact in bfloat16 and wider dtypes."""
        blocks = self.values.to(torch.float32).unflatten(-1, (self.scales.shape[-1], -1))
        values: torch.Tensor = blocks.mul_(self.scales.unsqueeze(-1))
        return values.flatten(-2).to(dtype)


def scales_of(largest: torch.Tensor) -> torch.Tensor:
    """Return the smallest powers of two that bring magnitudes (float32) to 448 or below.

    By their bits: powers of two from a GPU's `pow` need not be exact.
    """
    bits = largest.view(torch.int32)
    exponents = (bits + _ABOVE_448) >> _MANTISSA_BITS
    exponents = exponents.sub_(_EXPONENT_448).clamp_(1, _LARGEST_EXPONENT)
    scales = exponents.bitwise_left_shift_(_MANTISSA_BITS).view(torch.float32)
    return scales.masked_fill_(bits >= _INFINITE, torch.nan)


def quantize(x: torch.Tensor, form: Format) -> Scaled:
    """Return x (…, K) in 8 bits.

    Args:
        form: "fp8_rowwise" has one scale for all K values, "mxfp8" one for each 32.
    """
    block = MX_BLOCK if form == "mxfp8" else x.shape[-1]
    blocks = x.to(torch.float32).unflatten(-1, (-1, block))
    scales = scales_of(blocks.abs().amax(-1))
    values = (blocks / scales.unsqueeze(-1)).to(E4M3).flatten(-2).contiguous()
    return Scaled(values=values, scales=scales.contiguous())


def pack(rows: Scaled) -> torch.Tensor:
    """Return rows (R, K) and their scales, in e8m0, as bytes: (R, `packed_width`)."""
    num_rows, num_scales = rows.scales.shape
    width = rows.values.shape[1]
    room = packed_width(width, "mxfp8" if num_scales > 1 else "fp8_rowwise")
    packed = torch.zeros((num_rows, room), dtype=torch.uint8, device=rows.values.device)
    packed[:, :width] = rows.values.view(torch.uint8)
    packed[:, width : width + num_scales] = rows.scales.to(_E8M0).view(torch.uint8)
    return packed


def unpack(packed: torch.Tensor, width: int, form: Format) -> Scaled:
    """Return the rows (R, K) that `pack` made bytes of."""
    num_scales = width // MX_BLOCK if form == "mxfp8" else 1
    scales = packed[:, width : width + num_scales].contiguous().view(_E8M0)
    values = packed[:, :width].contiguous().view(E4M3)
    return Scaled(values=values, scales=scales.to(torch.float32))


def tiled(scales: torch.Tensor) -> torch.Tensor:
    """Return scales (…, rows, B) in e8m0 as tensor cores read them: (…, padded rows · padded B).

    Tiles of 128 rows and 4 scales follow each other row by row of tiles. In a tile the 4 scales of
    rows r, r + 32, r + 64 and r + 96 are neighbours. Padded scales are 1.

    Source: cuBLAS, "1D block scaling factors layout".
    """
    rows, width = scales.shape[-2:]
    padding = (0, -width % 4, 0, -rows % 128)
    padded = torch.nn.functional.pad(scales, padding, value=1.0)
    tiles = padded.unflatten(-1, (-1, 4)).unflatten(-3, (-1, 4, 32))
    # (…, tile row, quarter, row, tile column, scale) to (…, tile row, column, row, quarter, scale)
    ordered: torch.Tensor = tiles.movedim(-4, -2).movedim(-3, -4)
    return ordered.flatten(-5).to(_E8M0)
