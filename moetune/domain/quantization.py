"""Narrow formats of the GEMMs of whole models, which runtimes run and no layer of moetune does."""

from moetune.domain.units import dtype_bytes

NARROW: tuple[str, ...] = ("fp8_rowwise", "mxfp8", "nvfp4")
"""e4m3 with one scale for all values that one sum runs over, or one for each 32 of them (OCP MX);
e2m1 with a scale for each 16 values."""


def check_product_dtype(dtype: str) -> None:
    """Raise InputError for what is neither a dtype nor a narrow format that GEMMs have."""
    if dtype not in NARROW:
        dtype_bytes(dtype)
