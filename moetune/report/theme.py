"""Layout, axes and scales of all figures; colours are roles with a light and a dark value.

"@accent" is the colour of the stylesheet's `--accent`, "@accent/0.2" the same with opacity 0.2;
`moetune.js` replaces roles by values when it draws, and again when the reader changes the theme.
"""

from collections.abc import Sequence

from moetune.domain.units import format_bytes, format_seconds
from moetune.report.section import Drawing

ROLES = ("ink", "muted", "grid", "surface", "accent", "second", "third")
SERIES = ("@accent", "@second", "@third")
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))
_MOST_TICKS = 7
_SMALL = {"size": 12, "color": "@muted"}


def drawing(
    data: Sequence[dict[str, object]],
    *,
    x: dict[str, object],
    y: dict[str, object],
    **layout: object,
) -> Drawing:
    """Return the traces in the common layout.

    Args:
        x, y: axes, as `axis` makes them.
        layout: `barmode`, `bargap`, `shapes`, `annotations`, and a second panel's axes.
    """
    return {"data": list(data), "layout": {"xaxis": x, "yaxis": y, **layout}}


def axis(title: str, **changes: object) -> dict[str, object]:
    """Return an axis.

    Args:
        title: with the unit.
        changes: more keys, as `scales.scale_of` and `svg` read them.
    """
    return {"title": {"text": title}, **changes}


def log_seconds(title: str) -> dict[str, object]:
    """Return a logarithmic axis of seconds, labelled "10 µs", "1 ms"."""
    decades = [10.0**power for power in range(-9, 4)]
    words = [format_seconds(one).replace(".00", "").replace(".0", "") for one in decades]
    return axis(title, type="log", tickvals=decades, ticktext=words)


def log_sizes(title: str, low: float, high: float, *, unit: str) -> dict[str, object]:
    """Return a logarithmic axis with ticks at powers of two: "64 KiB", or "4k" of a count.

    Args:
        unit: "bytes", or the name of counted things.
    """
    ticks = _powers(low, high)
    words = [format_bytes(one) if unit == "bytes" else count_text(one) for one in ticks]
    if unit == "bytes":
        words = [word.replace(".00", "").replace(".0", "") for word in words]
    return axis(title, type="log", tickvals=ticks, ticktext=words)


def count_text(count: int) -> str:
    """Return "512", "8k" (8192), "2M" (2^21), "1G" (2^30)."""
    for factor, letter in ((2**40, "T"), (2**30, "G"), (2**20, "M"), (2**10, "k")):
        if count >= factor:
            return f"{count / factor:.3g}{letter}"
    return str(count)


def seconds_scale(seconds: float) -> tuple[float, str]:
    """Return the unit for a duration: its length in seconds, and its name."""
    return next((one for one in _SECONDS if seconds >= one[0]), (1.0, "s"))


def bytes_scale(num_bytes: float) -> tuple[float, str]:
    """Return the unit for a size: its number of bytes, and its name."""
    return next(((float(one), name) for one, name in _BYTES if num_bytes >= one), (1.0, "B"))


def upright(at: float, words: str) -> dict[str, object]:
    """Return a vertical line across the figure, with a label.

    Returns:
        Entries of a drawing's layout: `shapes` and `annotations`.
    """
    line = {"color": "@muted", "width": 1, "dash": "dot"}
    return {
        "shapes": [{"x0": at, "line": line}],
        "annotations": [note(words, x=at, y=1, yref="paper", xanchor="right", yanchor="top")],
    }


def note(words: str, **place: object) -> dict[str, object]:
    """Return an annotation without an arrow."""
    return {"text": words, "font": _SMALL, **place}


def _powers(low: float, high: float) -> list[int]:
    """Return at most seven powers of two within the range, in even steps."""
    exponents = [power for power in range(64) if low <= 2**power <= high]
    step = -(-len(exponents) // _MOST_TICKS) if exponents else 1
    return [2**power for power in exponents[::step]]
