"""Parsing and formatting of units at the edges: inside, everything is in SI and bytes."""

import math
import re
from types import MappingProxyType

from moetune.domain.errors import InputError

DTYPE_BYTES = MappingProxyType({"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2})

_SHORT_DTYPES = MappingProxyType(
    {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}
)
_BYTES = MappingProxyType(
    {
        "b": 1,
        "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
        "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
        "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    }
)  # fmt: skip
_COUNTS = MappingProxyType({"": 1, "k": 2**10, "m": 2**20})
_SECONDS = MappingProxyType(
    {"": 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
)
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def _parse(
    text: str, factors: MappingProxyType[str, int] | MappingProxyType[str, float], what: str
) -> float:
    match = _NUMBER.fullmatch(text)
    unit = match[2].lower() if match else ""
    if match is None or (unit not in factors and float(match[1])):
        known = ", ".join(unit for unit in factors if unit)
        form = "alone or with a unit" if "" in factors else "with a unit"
        raise InputError(f"{what} {text!r} must be a number of 0 or more, {form}: {known}")
    return float(match[1]) * factors.get(unit, 0)


def parse_bytes(text: str) -> int:
    """Return the bytes in `text`, such as "40GiB", "512 MB", "80G" (80 · 10⁹) or "4096B".

    Raises:
        InputError: the text is no size, or has no unit: 24 could be bytes, MB or GB.
    """
    if (number := text.strip()).isdigit() and int(number):
        raise InputError(
            f"size {text!r} has no unit", f"write {number}GB, {number}GiB, {number}MiB or {number}B"
        )
    return round(_parse(text, _BYTES, "size"))


def parse_count(text: str) -> int:
    """Return the whole number in `text`, such as "8192" or "8k" (8192).

    Raises:
        InputError: the text is no count, or not a whole one.
    """
    value = _parse(text, _COUNTS, "count")
    if value != int(value):
        raise InputError(f"count {text!r} is not a whole number")
    return int(value)


def parse_seconds(text: str) -> float:
    """Return the seconds in `text`, such as "90s", "2m", "1.5h" or "7d".

    Raises:
        InputError: the text is no duration.
    """
    return _parse(text, _SECONDS, "duration")


def format_seconds(seconds: float) -> str:
    """Return a duration with three significant digits: "21.4 ms", "87.3 µs", "1.25 s"."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= factor:
            return f"{_three_digits(seconds / factor)} {unit}"
    return f"{_three_digits(seconds / 1e-9)} ns" if seconds else "0 s"


def format_bytes(num_bytes: float) -> str:
    """Return a size with binary units: "9.8 GiB", "512 KiB", "96 B"."""
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(num_bytes) >= factor:
            return f"{_three_digits(num_bytes / factor)} {unit}"
    return f"{num_bytes:.0f} B"


def format_flops(flops_per_second: float) -> str:
    """Return a rate of operations: "423 TFLOP/s", "87.3 GFLOP/s"."""
    factor, unit = (1e12, "T") if flops_per_second >= 1e12 else (1e9, "G")  # noqa: PLR2004
    return f"{_three_digits(flops_per_second / factor)} {unit}FLOP/s"


def _three_digits(value: float) -> str:
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{digits}f}"


def pinned_bytes(num_bytes: int) -> int:
    """Return what torch takes for an allocation of page-locked memory: the next power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def full_dtype(text: str) -> str:
    """Return torch's name of a dtype: "bfloat16" for "bf16"; any other text as it is."""
    return _SHORT_DTYPES.get(text, text)


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element.

    Raises:
        InputError: the dtype is not one of `DTYPE_BYTES`.
    """
    if dtype not in DTYPE_BYTES:
        raise InputError(f"dtype {dtype!r} is unknown", f"use one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]
