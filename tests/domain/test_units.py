"""Units are read and written as the SI brochure and IEC 80000-13 define them."""

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.errors import InputError
from moetune.domain.units import (
    DTYPE_BYTES,
    dtype_bytes,
    format_amount,
    format_bytes,
    format_days,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_flops,
    parse_rate,
    parse_seconds,
    parse_startup,
)

PREFIXES = "kmgt"


@pytest.mark.parametrize("number", ["1", "3", "2.5"])
def test_decimal_prefixes_are_powers_of_1000_and_binary_of_1024(number: str) -> None:
    assert parse_bytes("7b") == parse_bytes(" 7 B ") == 7
    for power, prefix in enumerate(PREFIXES, start=1):
        for text in (f"{number}{prefix}b", f"{number} {prefix.upper()}B"):
            assert parse_bytes(text) == float(number) * 1000**power
        for text in (f"{number}{prefix}ib", f"{number} {prefix.upper()}iB"):
            assert parse_bytes(text) == float(number) * 1024**power


def test_counts_have_binary_prefixes_and_durations_the_hours_and_minutes() -> None:
    assert [parse_count(text) for text in ("5", "2k", "3M", "0.5k")] == [5, 2048, 3 * 2**20, 512]
    texts = ("2", "2s", "2ms", "2m", "2 min", "1.5h")
    assert [parse_seconds(text) for text in texts] == [2, 2, 2e-3, 120, 120, 5400]


@pytest.mark.parametrize("text", ["", "k", "-1", "1e3", "1.", ".5", "1 kk", "1,5", "nan"])
def test_what_is_no_number_with_a_unit_is_refused(text: str) -> None:
    for parse in (parse_bytes, parse_count, parse_seconds):
        with pytest.raises(InputError) as caught:
            parse(text)
        assert repr(text) in caught.value.what


@pytest.mark.parametrize(("seconds", "text"), [
    (0.0, "0 s"), (1.0, "1.00 s"), (12.34, "12.3 s"), (123.4, "123 s"), (1234.0, "1234 s"),
    (0.1, "100 ms"), (1e-3, "1.00 ms"), (0.9e-3, "900 µs"), (1e-6, "1.00 µs"),
    (0.9e-6, "900 ns"), (1e-9, "1.00 ns"), (-0.0214, "-21.4 ms"),
    (8.9e-16, "0 s"),
])  # fmt: skip
def test_durations_have_three_digits_in_the_unit_of_their_size(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.integers(0, 2**50))
def test_a_written_size_is_read_back_to_its_three_digits(num_bytes: int) -> None:
    text = format_bytes(num_bytes)
    assert abs(parse_bytes(text) - num_bytes) <= 0.006 * num_bytes
    assert re.fullmatch(r"\d[\d.]* ([KMGT]i)?B", text)


def test_elements_have_the_bytes_that_torch_gives_them() -> None:
    for name in DTYPE_BYTES:
        assert dtype_bytes(name) == getattr(torch, name).itemsize
    with pytest.raises(InputError, match="int8"):
        dtype_bytes("int8")


def test_sizes_need_a_unit_and_short_units_are_decimal() -> None:
    assert parse_bytes("80G") == parse_bytes("80GB") == 80 * 10**9
    assert parse_bytes("0") == 0
    with pytest.raises(InputError, match="has no unit") as caught:
        parse_bytes("24")
    assert "24GB, 24GiB" in caught.value.hint


numbers = st.one_of(
    st.integers(1, 10**6).map(str), st.floats(0.01, 1e6).map(lambda value: f"{value:.6f}")
)


@given(numbers, st.sampled_from(["", "k", "M", "G", "T"]))
def test_eight_bits_are_a_byte_at_every_prefix(number: str, prefix: str) -> None:
    factor = 1000 ** ["", "k", "M", "G", "T"].index(prefix)
    num_bytes = parse_rate(f"{number}{prefix}B/s")
    assert num_bytes == pytest.approx(float(number) * factor)
    assert parse_rate(f"{number} {prefix}bit/s") == pytest.approx(num_bytes / 8)


@given(st.floats(1.0, 1e15))
def test_a_written_rate_is_read_back_to_its_three_digits(rate: float) -> None:
    assert parse_rate(format_rate(rate)) == pytest.approx(rate, rel=0.006, abs=0.5)


@given(numbers)
def test_arithmetic_and_start_ups_are_in_si(number: str) -> None:
    value = float(number)
    for prefix, factor in (("G", 1e9), ("T", 1e12), ("P", 1e15)):
        for unit in ("FLOP/s", "FLOPS"):
            assert parse_flops(f"{number}{prefix}{unit}") == pytest.approx(value * factor)
    for unit, factor in (("s", 1), ("ms", 1e-3), ("us", 1e-6), ("µs", 1e-6), ("ns", 1e-9)):
        assert parse_startup(f"{number}{unit}") == pytest.approx(value * factor)


@pytest.mark.parametrize(("parse", "text"), [
    *((parse_rate, f"50{unit}") for unit in ("Gb/s", "gb/s", "Gbps", "GBps", " b/s", "GBPS")),
    (parse_bytes, "80Gb"), (parse_bytes, "80Gib"),
])  # fmt: skip
def test_what_could_be_in_bits_is_refused(parse: Callable[[str], float], text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(text)
    assert "bit" in f"{caught.value.what} {caught.value.hint}"


@pytest.mark.parametrize("text", ["0GB/s", "-1GB/s", "nan", "infGB/s", "1e400GB/s", "7XB/s", ""])
def test_a_rate_is_a_number_above_0(text: str) -> None:
    with pytest.raises(InputError):
        parse_rate(text)
    with pytest.raises(InputError):
        parse_flops(text.replace("GB/s", "TFLOP/s"))


def test_a_bare_number_is_answered_with_the_units_it_could_have() -> None:
    for parse, text, units in (
        (parse_rate, "42", ("42GB/s", "42Gbit/s")), (parse_flops, "989", ("989TFLOP/s",)),
        (parse_startup, "12", ("12us", "12ms")), (parse_bytes, "80000000000", ("80000000000B",)),
    ):  # fmt: skip
        with pytest.raises(InputError, match="has no unit") as caught:
            parse(text)
        assert all(unit in caught.value.hint for unit in units)
    assert parse_startup("0") == 0


@pytest.mark.parametrize(
    ("amount", "text"),
    [(0.0125, "0.0125"), (2.5, "2.50"), (99.94, "99.9"), (100.2, "100"), (108012.4, "108,012")],
)
def test_amounts_have_three_digits_or_all_whole_digits(amount: float, text: str) -> None:
    assert format_amount(amount) == text


@pytest.mark.parametrize(
    ("days", "text"), [(28.13, "28.1 days"), (1.0, "1.00 days"), (0.25, "6.00 hours"),
                       (0.01, "14.4 minutes")],
)  # fmt: skip
def test_durations_have_the_largest_unit_of_which_there_is(days: float, text: str) -> None:
    assert format_days(days) == text
