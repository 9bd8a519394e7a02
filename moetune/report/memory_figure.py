"""The parts of a device's memory as bars, and what is left of its limit."""

from collections.abc import Mapping

from moetune.domain.units import format_bytes
from moetune.report.section import Figure, percent
from moetune.report.theme import SERIES, axis, bytes_scale, drawing

FREE = "free below the limit"
OVER = "missing to the limit"
_ROOM = 1.4
"""Of the longest bar, so that its size fits beside it on a phone, too."""


def memory_parts_figure(
    parts: Mapping[str, float], *, limit_bytes: int | None, words: str
) -> Figure:
    """Return the parts that take memory as bars, the largest first, then what the limit leaves.

    Args:
        parts: bytes by name; those of none are omitted.
        limit_bytes: usable memory of the device; None where it is not known.
        words: whose memory it is, a sentence.
    """
    taken = sum(parts.values())
    rows = sorted(((name, size) for name, size in parts.items() if size), key=lambda one: -one[1])
    left = [] if limit_bytes is None else [_left(limit_bytes - taken)]
    scale, unit = bytes_scale(max((size for _, size in (*rows, *left)), default=1))
    whole = limit_bytes or taken
    of = "" if limit_bytes is None else f" of the limit of {format_bytes(limit_bytes)}"
    longest = max((size for _, size in (*rows, *left)), default=1) / scale
    return Figure(
        name="memory-parts",
        title="Memory part by part",
        is_wide=True,
        words=f"{words} {format_bytes(taken)}{of}.",
        drawing=drawing(
            [
                _bars(some, scale, whole, color)
                for some, color in ((rows, SERIES[0]), (left, SERIES[2]))
                if some
            ],
            x=axis(unit, range=[0.0, _ROOM * longest]),
            y=axis("", autorange="reversed", showgrid=False),
            showlegend=False,
        ),
        header=("part", "bytes", "share"),
        rows=tuple((name, size, size / whole) for name, size in (*rows, *left)),
    )


def _left(size: float) -> tuple[str, float]:
    return (FREE, size) if size >= 0 else (OVER, -size)


def _bars(
    rows: list[tuple[str, float]], scale: float, whole: float, color: str
) -> dict[str, object]:
    words = [format_bytes(size) for _, size in rows]
    return {
        "type": "bar", "y": [name for name, _ in rows],
        "x": [size / scale for _, size in rows], "marker": {"color": color},
        "text": words, "textposition": "outside",
        "hovertext": [
            f"{name}: {format_bytes(size)}, {percent(size / whole)}" for name, size in rows
        ],
    }  # fmt: skip
