"""Parsing and formatting of units at the edges; internal values are in SI units and bytes."""

import math
import re
from types import MappingProxyType

from moetune.domain.document import shown
from moetune.domain.errors import InputError

DTYPE_BYTES = MappingProxyType({"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2})
FULL_BYTES = 4
"""Bytes of a value in full precision: float32."""

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
_TRAIN_TOKENS = MappingProxyType({"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12})
_SECONDS = MappingProxyType(
    {"": 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
)
_TIMES = MappingProxyType({"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9})
_RATES = MappingProxyType(
    {
        f"{prefix}{unit}/s": factor / bits
        for bits, unit in ((1, "B"), (8, "bit"))
        for prefix, factor in (("", 1), ("k", 10**3), ("M", 10**6), ("G", 10**9), ("T", 10**12))
    }
)
"""Bytes per second by unit, as written; Gb/s is refused, since it could be bits or bytes."""
_FLOPS = MappingProxyType(
    {
        f"{prefix}{unit}": factor
        for prefix, factor in (("G", 1e9), ("T", 1e12), ("P", 1e15))
        for unit in ("FLOP/s", "FLOPS")
    }
)
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-zµμ/]*)\s*")
_LOOKS_LIKE_BITS = re.compile(r"[KMGT]i?b")
_BITS_OR_BYTES = re.compile(r"([kKmMgGtT]?)[bB](?:/s|ps)")
_LEAST_SECONDS = 1e-12
_SURELY_TOKENS = 10**5
"""From here on, a bare number of a training's tokens hardly means billions."""
_SURELY_BYTES = 10**6
"""From here on, a bare number hardly means MiB."""
_Factors = MappingProxyType[str, int] | MappingProxyType[str, float]


def _parse(text: str, factors: _Factors, what: str, *, least: int = 0) -> float:
    match = _NUMBER.fullmatch(text)
    unit = match[2] if match else ""
    if all(name == name.lower() for name in factors):  # no two differ in case alone
        unit = unit.lower()
    if match is None or (unit not in factors and float(match[1])):
        units = ", ".join(unit for unit in factors if unit)
        form = "alone or with a unit" if "" in factors else "with a unit"
        raise InputError(
            f"{what} {shown(text)} must be a number of {least} or more, {form}: {units}"
        )
    value = float(match[1]) * factors.get(unit, 0)
    if math.isinf(value):
        raise InputError(f"{what} {shown(text)} is too large")
    return value


def _check_has_unit(text: str, what: str, *units: str) -> None:
    """Raise InputError with the possible units if the text is a bare number."""
    match = _NUMBER.fullmatch(text)
    if match is not None and not match[2] and float(match[1]):
        *first, last = (f"{shown(match[1])[1:-1]}{unit}" for unit in units)
        raise InputError(f"{what} {shown(text)} has no unit", f"write {', '.join(first)} or {last}")


def _positive(value: float, text: str, what: str) -> float:
    if value <= 0:
        raise InputError(f"{what} {shown(text)} must be above 0")
    return value


def parse_bytes(text: str) -> int:
    """Return the bytes in `text`, such as "40GiB"; raises InputError without a unit or for bits."""
    match = _NUMBER.fullmatch(text)
    is_many = match is not None and float(match[1]) >= _SURELY_BYTES
    _check_has_unit(text, "size", *(("B", "kB") if is_many else ("GB", "GiB", "MiB", "B")))
    if match is not None and _LOOKS_LIKE_BITS.fullmatch(match[2]):
        raise InputError(
            f"size {shown(text)} could be bits", f"write {match[1]}{match[2][:-1]}B for bytes"
        )
    return round(_parse(text, _BYTES, "size"))


def parse_rate(text: str) -> float:
    """Return the bytes per second in `text`, such as "50GB/s"; InputError if they may be bits."""
    _check_has_unit(text, "rate", "GB/s", "Gbit/s", "MB/s")
    match = _NUMBER.fullmatch(text)
    doubtful = _BITS_OR_BYTES.fullmatch(match[2]) if match else None
    if match is not None and doubtful is not None and match[2] not in _RATES:
        prefix = doubtful[1].upper().replace("K", "k")
        raise InputError(
            f"rate {shown(text)} could be bits or bytes",
            f"write {match[1]}{prefix}bit/s or {match[1]}{prefix}B/s, which is 8 times as much",
        )
    return _positive(_parse(text, _RATES, "rate"), text, "rate")


def parse_flops(text: str) -> float:
    """Return the FLOP/s in `text`, such as "989TFLOP/s"; InputError for 0 or without a unit."""
    _check_has_unit(text, "rate", "TFLOP/s", "GFLOP/s", "PFLOP/s")
    return _positive(_parse(text, _FLOPS, "rate"), text, "rate")


def parse_startup(text: str) -> float:
    """Return the seconds of a start-up in `text`, such as "12us"; InputError for "12" or "12m"."""
    _check_has_unit(text, "time", "us", "ms", "s")
    return _parse(text, _TIMES, "time")


def parse_count(text: str, *, least: int = 0) -> int:
    """Return the whole number in `text`, such as "8k" (8192); InputError for another text."""
    value = _parse(text, _COUNTS, "count", least=least)
    if value != int(value):
        raise InputError(f"count {text!r} is not a whole number")
    return int(value)


def parse_train_tokens(text: str) -> int:
    """Return a training's tokens in `text`: "15T" or "1e12"; InputError for few without a unit."""
    try:
        plain = float(text)
    except ValueError:
        return round(_parse(text, _TRAIN_TOKENS, "number of tokens", least=1))
    if not math.isfinite(plain) or plain < 0:
        raise InputError(f"number of tokens {shown(text)} must be a number of 1 or more")
    if 0 < plain < _SURELY_TOKENS:
        raise InputError(
            f"number of tokens {shown(text)} has no unit", f"write {plain:g}B or {plain:g}T"
        )
    return round(plain)


def parse_seconds(text: str) -> float:
    """Return the seconds in `text`, such as "90s", "2m" or "7d"; InputError for other text."""
    return _parse(text, _SECONDS, "duration")


def parse_age(text: str) -> float:
    """Return the seconds in `text`, such as "90s" or "7d"; also InputError without a unit."""
    _check_has_unit(text, "duration", "d", "h", "s")
    return parse_seconds(text)


def format_seconds(seconds: float) -> str:
    """Return a duration with three digits, such as "21.4 ms"; 0 for less than a picosecond."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= factor:
            return f"{_three_digits(seconds / factor)} {unit}"
    return f"{_three_digits(seconds / 1e-9)} ns" if abs(seconds) >= _LEAST_SECONDS else "0 s"


def format_days(days: float) -> str:
    """Return a long duration: "28.1 days", "5.30 hours", "12.0 minutes"."""
    for factor, unit in ((1.0, "days"), (24.0, "hours")):
        if days * factor >= 1:
            return f"{format_amount(days * factor)} {unit}"
    return f"{format_amount(days * 24 * 60)} minutes"


def format_amount(amount: float) -> str:
    """Return a number with three digits, or all digits before the point: "2.50", "108,012"."""
    return f"{amount:,.0f}" if abs(amount) >= 100 else _three_digits(amount)  # noqa: PLR2004


def format_train_tokens(tokens: int) -> str:
    """Return a training's tokens in the usual form: "15T", "1.5B", "12,345"."""
    for unit in ("t", "b", "m"):
        if tokens >= _TRAIN_TOKENS[unit]:
            return f"{tokens / _TRAIN_TOKENS[unit]:.6g}{unit.upper()}"
    return f"{tokens:,}"


def format_rate(bytes_per_second: float) -> str:
    """Return a rate with decimal units: "50.0 GB/s", "3.35 TB/s", "96 B/s"."""
    return f"{_in_units(bytes_per_second, TB=1e12, GB=1e9, MB=1e6, kB=1e3)}/s"


def format_bytes(num_bytes: float) -> str:
    """Return a size with binary units: "9.8 GiB", "512 KiB", "96 B"."""
    return _in_units(num_bytes, TiB=2**40, GiB=2**30, MiB=2**20, KiB=2**10)


def _in_units(num_bytes: float, **units: float) -> str:
    """Return bytes in the first unit that they reach, else in whole bytes."""
    for unit, factor in units.items():
        if abs(num_bytes) >= factor:
            return f"{_three_digits(num_bytes / factor)} {unit}"
    return f"{num_bytes:.0f} B"


def format_degree(forward: int, backward: int) -> str:
    """Return a number of chunks: "4", or "4 and 2" for older plans, whose phases may differ."""
    return str(forward) if forward == backward else f"{forward} and {backward}"


def format_chunks(forward: int, backward: int) -> str:
    """Return "4 chunks" or "1 chunk", or "4 and 2 chunks" for older plans."""
    return f"{format_degree(forward, backward)} chunk{'' if forward == backward == 1 else 's'}"


def format_flops(flops_per_second: float) -> str:
    """Return a rate of operations: "423 TFLOP/s", "87.3 GFLOP/s"."""
    factor, unit = (1e12, "T") if flops_per_second >= 1e12 else (1e9, "G")  # noqa: PLR2004
    return f"{_three_digits(flops_per_second / factor)} {unit}FLOP/s"


def format_share(share: float, *, digits: int = 1, sign: bool = False) -> str:
    """Return a share as "12.3 %", with `sign` as "+12.3 %"."""
    rounded = round(100 * share, digits) + 0.0  # a negative zero loses its sign
    return f"{rounded:{'+' if sign else ''},.{digits}f} %"


def _three_digits(value: float) -> str:
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{digits}f}"


def pinned_bytes(num_bytes: int) -> int:
    """Return the bytes of torch's allocation of pinned memory: the next power of two."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def full_dtype(text: str) -> str:
    """Return torch's name of a dtype: "bfloat16" for "bf16"; other text is unchanged."""
    return _SHORT_DTYPES.get(text, text)


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element; raises InputError for a dtype not in `DTYPE_BYTES`."""
    if dtype not in DTYPE_BYTES:
        raise InputError(f"dtype {dtype!r} is unknown", f"use one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


NARROW: tuple[str, ...] = ("fp8_rowwise", "mxfp8", "nvfp4")
"""Narrow formats of GEMMs. "fp8_rowwise" is e4m3 with a scale for all values of a sum, "mxfp8" with
a scale for each 32 values (OCP MX), and "nvfp4" is e2m1 with a scale for each 16 values."""


def check_product_dtype(dtype: str) -> None:
    """Raise InputError for text that is neither a dtype nor a narrow format of GEMMs."""
    if dtype not in NARROW:
        dtype_bytes(dtype)
