"""Fields in which two documents differ, as a table with their units."""

from collections.abc import Callable, Sequence

from moetune.domain.constraint_texts import constraint_words
from moetune.domain.units import format_bytes, format_seconds
from moetune.report.section import EMPTY, Cell, Section, Table, percent

_SMALL, _LARGE = 0.01, 100
_SIZES = ("memory.parts.", "memory.activations.")
_TIMES = ("predicted.parts.", "predicted.mean_parts.")
_SHARES = ("probability_best", "expected_regret", ".mfu", "_ratio")
_RATES = {"_per_byte": (1e9, "GB"), "_per_mac": (1e12, "TMAC"), "_per_element": (1e9, "G")}


def differences_section(
    found: Sequence[tuple[str, object, object]], *, names: tuple[str, str]
) -> Section:
    """Return every field with its two values and their ratio.

    Args:
        found: (key, first value, second value); the key's ending tells the unit.
        names: the headings of the values.
    """
    table = Table(
        name="differences",
        header=("", *names, "ratio"),
        rows=tuple(
            (
                Cell.words(key, mark="code"),
                _value(key, first),
                _value(key, second),
                _ratio(first, second),
            )
            for key, first, second in found
        ),
        empty=f"None: {names[0]} and {names[1]} are equal.",
    )
    return Section(name="differences", title="Differences", tables=(table,))


def _value(key: str, value: object) -> Cell:
    if value is None:
        return Cell(text="–")
    if key.endswith("_fingerprint"):
        return Cell(text=str(value)[:12], value=str(value), mark="code")
    if isinstance(value, bool):
        return Cell.words("yes" if value else "no")
    if not isinstance(value, int | float):
        return Cell.words(constraint_words(key.rpartition(".constraints.")[2], str(value)))
    return Cell(text=_number(key, value), value=value)


def _number(key: str, value: float) -> str:
    """Return a number in the unit that its key ends with."""
    for is_of, words in _UNITS:
        if is_of(key):
            return words(value)
    for ending, (factor, name) in _RATES.items():
        if key.endswith(ending):
            return f"{format_seconds(value * factor)} per {name}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


_UNITS: tuple[tuple[Callable[[str], bool], Callable[[float], str]], ...] = (
    (lambda key: key.endswith("_bytes") or key.startswith(_SIZES), format_bytes),
    (lambda key: key.endswith("_seconds") or key.startswith(_TIMES), format_seconds),
    (
        lambda key: key.endswith("flops_per_second_per_device"),
        lambda value: f"{value / 1e12:,.3g} TFLOP/s",
    ),
    (lambda key: key.endswith(_SHARES), percent),
    (lambda key: "tokens_per_second" in key, lambda value: f"{value:,.0f}"),
)
"""Units of a field's number, by its key."""


def _ratio(first: object, second: object) -> Cell:
    numbers = [one for one in (first, second) if isinstance(one, int | float)]
    if len(numbers) != len((first, second)) or not numbers[0]:
        return EMPTY
    ratio = numbers[1] / numbers[0]
    text = f"{ratio:,.{2 if ratio < _LARGE else 0}f} ×"
    if 0 < ratio < _SMALL:
        text = f"under {_SMALL} ×"
    return Cell(text=text, value=ratio, unit="1")
