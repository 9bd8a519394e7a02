"""Peak rates of matrix products, and of links, on the data sheets of GPUs.

All are of one device, without sparsity, and sum in float32; float32 is without TF32, as torch
multiplies unless it is told otherwise. A GPU that is not here, or a number that its maker gives
for other boards only, has no peak: no other is put in its place.
"""

from collections.abc import Mapping
from types import MappingProxyType

_HALF = ("float16", "bfloat16")
_EIGHT_BITS = ("fp8", "fp8_rowwise", "mxfp8")


def _peaks(
    *, half: float, eight: float = 0.0, four: float = 0.0, full: float = 0.0
) -> Mapping[str, float]:
    """Return FLOP/s by number format, from TFLOP/s; 0 for none."""
    rates = {
        **dict.fromkeys(_HALF, half),
        **dict.fromkeys(_EIGHT_BITS, eight),
        "nvfp4": four,
        "float32": full,
    }
    return MappingProxyType({name: rate * 1e12 for name, rate in rates.items() if rate})


_A100 = _peaks(half=312.0, full=19.5)
_HOPPER = _peaks(half=989.5, eight=1979.0, full=67.0)
PEAK_FLOPS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        # NVIDIA V100 data sheet, SXM2; tensor cores multiply no bfloat16.
        "NVIDIA Tesla V100 SXM2 32GB": MappingProxyType({"float16": 125e12, "float32": 15.7e12}),
        "Tesla V100-SXM2-16GB": MappingProxyType({"float16": 125e12, "float32": 15.7e12}),
        "Tesla V100-SXM2-32GB": MappingProxyType({"float16": 125e12, "float32": 15.7e12}),
        # NVIDIA Turing GPU Architecture, WP-09183-001, table 1, reference board: 107.6 TFLOP/s
        # where sums are in float16; tensor cores multiply no bfloat16.
        "NVIDIA GeForce RTX 2080 Ti": MappingProxyType({"float16": 53.8e12, "float32": 13.4e12}),
        # NVIDIA A100 data sheet.
        "NVIDIA A100 80GB PCIe": _A100,
        "NVIDIA A100-PCIE-40GB": _A100,
        "NVIDIA A100-SXM4-40GB": _A100,
        "NVIDIA A100-SXM4-80GB": _A100,
        # NVIDIA H100 and H200 data sheets, SXM: half of the rates with sparsity. The H800's
        # tensor cores are the H100's.
        "NVIDIA H100 80GB HBM3": _HOPPER,
        "NVIDIA H200": _HOPPER,
        "NVIDIA H800": _HOPPER,
        # NVIDIA HGX B200 and HGX B300 data sheets, an eighth of a board.
        "NVIDIA B200": _peaks(half=2250.0, eight=4500.0, four=9000.0),
        "NVIDIA B300 SXM6 AC": _peaks(half=2250.0, eight=4500.0, four=13_500.0),
        # NVIDIA GB200 NVL72 and GB300 NVL72 data sheets, a 72nd of a rack.
        "NVIDIA GB200": _peaks(half=2500.0, eight=5000.0, four=10_000.0),
        "NVIDIA GB300": _peaks(half=2500.0, eight=5000.0, four=15_000.0),
    }
)


def peak_flops(device: str, dtype: str) -> float | None:
    """Return the peak in FLOP/s of one device; None where no data sheet is known.

    Args:
        dtype: of the products, or their format in 8 or 4 bits.
    """
    return PEAK_FLOPS.get(device, {}).get(dtype)


LINK_BYTES_PER_SECOND: Mapping[str, float] = MappingProxyType(
    {
        "a100": 300e9, "h100": 450e9, "h200": 450e9, "h800": 200e9, "b200": 900e9, "b300": 900e9,
        "gb200": 900e9, "gb300": 900e9,
    }
)  # fmt: skip
"""NVLink of one GPU to the others of its node, all of them together, one way; by the first part of
a reference machine's name. The data sheets give both ways together."""
