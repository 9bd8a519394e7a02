"""Figures of fits: an operation's points, curve, band and residuals, and two profiles' curves."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import cast

import numpy as np

from moetune.domain.units import format_bytes, format_seconds
from moetune.fit.curve import left_out_errors
from moetune.fit.index import Points
from moetune.fit.operations import Curves
from moetune.fit.variants import NUM_RESAMPLES, RESAMPLING_SEED, drawn_seconds
from moetune.report.operations import OperationCurve
from moetune.report.section import Figure, Value
from moetune.report.theme import SERIES, axis, drawing, log_seconds, log_sizes

_BAND_PERCENT = (5.0, 95.0)
_PER_OCTAVE = 4
_LEAST_STEPS = 24
_UNMEASURED: Mapping[str, tuple[float, float]] = MappingProxyType({
    "bytes": (2.0**10, 2.0**28), "MACs": (2.0**20, 2.0**40), "elements": (2.0**10, 2.0**34),
    "chunks": (1.0, 64.0),
})  # fmt: skip
"""Range of sizes in which a line without measured sizes is drawn, by the line's unit."""


def fit_figure(operation: OperationCurve) -> Figure:
    """Return raw times, medians, the curve between them, its 5–95 % band and the α–β line."""
    sizes = _grid(operation)
    nominal = _nominal(operation, sizes)
    low, high = _band(operation, sizes)
    line = [operation.line.seconds(size) for size in sizes] if operation.line else []
    data = [
        *_band_traces(sizes, low, high),
        _line_trace("predicted", sizes, nominal, color=SERIES[0]),
        *([_line_trace("α–β line", sizes, line, color="@muted", dash="dot")]
          if line and isinstance(operation.found, Points) else []),
        *_point_traces(operation),
    ]  # fmt: skip
    rows: list[tuple[Value, ...]] = [
        ("predicted", size, value, below, above)
        for size, value, below, above in zip(sizes, nominal, low, high, strict=True)
    ]
    return Figure(
        name="fit",
        is_wide=True,
        title=operation.name,
        words=_words(operation),
        drawing=drawing(
            data,
            x=log_sizes(_size_title(operation), sizes[0], sizes[-1], unit=operation.unit),
            y=log_seconds("time of one"),
        ),
        header=("kind", f"size_{operation.unit.lower()}", "seconds", "p05_seconds", "p95_seconds"),
        rows=(*_measured_rows(operation), *rows),
    )


def residual_figure(operation: OperationCurve) -> Figure | None:
    """Return the relative errors of predictions at the measured points; None without points.

    The curve is fitted without the predicted point; the α–β line to all points.
    """
    found = operation.found
    if not isinstance(found, Points):
        return None
    series = found.series
    curve = left_out_errors(
        sizes=series.sizes, seconds=series.medians, alpha_seconds=found.alpha_seconds
    )
    line = {
        at: operation.line.seconds(size) / seconds - 1
        for at, (size, seconds) in enumerate(zip(series.sizes, series.medians, strict=True))
        if operation.line and len(series.sizes) > 1
    }
    if not curve:
        return None
    ends = series.sizes[0], series.sizes[-1]
    return Figure(
        name="residuals",
        is_low=True,
        title="Residuals",
        words=(
            "Relative error of the prediction at each measured median: by the curve without the "
            "point, and by the α–β line. The two ends of the curve are never left out."
        ),
        drawing=drawing(
            [
                _residuals("α–β line", line, operation, symbol="x-thin-open", color="@muted"),
                _residuals("curve, point left out", curve, operation, symbol="circle"),
            ],
            x=log_sizes(_size_title(operation), ends[0] / 2, ends[1] * 2, unit=operation.unit),
            y=axis("relative error", tickformat="+.0%", zeroline=True),
        ),
        header=(f"size_{operation.unit.lower()}", "curve_left_out", "alpha_beta_line"),
        rows=tuple(
            (size, curve.get(at), line.get(at)) for at, size in enumerate(series.sizes)
        ),
    )  # fmt: skip


def overlay_figure(first: OperationCurve, second: OperationCurve, names: tuple[str, str]) -> Figure:
    """Return the same operation of two profiles in one figure."""
    data: list[dict[str, object]] = []
    rows: list[tuple[Value, ...]] = []
    grids = _grid(first), _grid(second)
    for operation, name, sizes, color in zip((first, second), names, grids, SERIES, strict=False):
        low, high = _band(operation, sizes)
        nominal = _nominal(operation, sizes)
        data += [
            *_band_traces(sizes, low, high, color=color, legend=False),
            _line_trace(name, sizes, nominal, color=color),
        ]
        rows += [(name, *one) for one in zip(sizes, nominal, low, high, strict=True)]
    ends = min(sizes[0] for sizes in grids), max(sizes[-1] for sizes in grids)
    return Figure(
        name=f"fit-{first.key}",
        title=first.name,
        words=f"Predicted times of {first.name} in both profiles, with their 5–95 % bands.",
        drawing=drawing(
            data,
            x=log_sizes(_size_title(first), *ends, unit=first.unit),
            y=log_seconds("time of one"),
        ),
        header=("profile", f"size_{first.unit.lower()}", "seconds", "p05_seconds", "p95_seconds"),
        rows=tuple(rows),
    )


def _nominal(operation: OperationCurve, sizes: Sequence[float]) -> list[float]:
    [seconds] = Curves().times(operation.found).seconds_at(np.array(sizes)).tolist()
    return cast("list[float]", seconds)


def _band(operation: OperationCurve, sizes: Sequence[float]) -> tuple[list[float], list[float]]:
    seconds = drawn_seconds(operation.found, sizes, num=NUM_RESAMPLES, seed=RESAMPLING_SEED)
    low, high = np.percentile(seconds, _BAND_PERCENT, axis=0)
    return low.tolist(), high.tolist()


def _grid(operation: OperationCurve) -> list[float]:
    """Return sizes in even logarithmic steps, from half the smallest point to twice the largest."""
    found, error = operation.found, operation.error
    if isinstance(found, Points):
        low, high = found.series.sizes[0] / 2, found.series.sizes[-1] * 2
    elif error is not None:
        low, high = error.low, error.high
    else:
        low, high = _UNMEASURED[operation.unit]
    steps = max(_LEAST_STEPS, round(_PER_OCTAVE * math.log2(high / low)))
    return [low * (high / low) ** (step / steps) for step in range(steps + 1)]


def _band_traces(
    sizes: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    *,
    color: str = SERIES[0],
    legend: bool = True,
) -> list[dict[str, object]]:
    common = {"type": "scatter", "mode": "lines", "line": {"width": 0}}
    return [
        {**common, "x": list(sizes), "y": list(low), "showlegend": False},
        {
            **common, "x": list(sizes), "y": list(high), "name": "5–95 %",
            "fillcolor": f"{color}/0.16", "showlegend": legend,
        },
    ]  # fmt: skip


def _line_trace(
    name: str, sizes: Sequence[float], seconds: Sequence[float], *, color: str, dash: str = "solid"
) -> dict[str, object]:  # fmt: skip
    return {
        "type": "scatter", "mode": "lines", "name": name, "x": list(sizes), "y": list(seconds),
        "line": {"color": color, "width": 2 if dash == "solid" else 1.5, "dash": dash},
    }  # fmt: skip


def _point_traces(operation: OperationCurve) -> list[dict[str, object]]:
    if not isinstance(operation.found, Points):
        return []
    series = operation.found.series
    raw = [
        (size, seconds)
        for size, times in zip(series.sizes, series.times, strict=True)
        for seconds in times
    ]
    return [
        {
            "type": "scatter", "mode": "markers", "name": "single blocks",
            "x": [size for size, _ in raw], "y": [seconds for _, seconds in raw],
            "marker": {"color": "@second/0.35", "size": 4},
        },
        {
            "type": "scatter", "mode": "markers", "name": "medians", "x": list(series.sizes),
            "y": list(series.medians),
            "marker": {"color": SERIES[0], "size": 8, "line": {"color": "@surface", "width": 1.5}},
            "hovertext": [
                f"measured: {_size_text(size, operation.unit)}: {format_seconds(seconds)}"
                for size, seconds in zip(series.sizes, series.medians, strict=True)
            ],
        },
    ]  # fmt: skip


def _residuals(
    name: str, errors: dict[int, float], operation: OperationCurve,
    *, symbol: str, color: str = SERIES[0],
) -> dict[str, object]:  # fmt: skip
    assert isinstance(operation.found, Points)  # noqa: S101 - the caller has looked
    sizes = [operation.found.series.sizes[at] for at in errors]
    marker = {"symbol": symbol, "color": color, "size": 9, "line": {"color": color, "width": 1.5}}
    return {
        "type": "scatter", "mode": "markers", "name": name, "x": sizes, "y": list(errors.values()),
        "marker": marker,
        "hovertext": [
            f"{name}: {_size_text(size, operation.unit)}: {error:+.1%}"
            for size, error in zip(sizes, errors.values(), strict=True)
        ],
    }  # fmt: skip


def _measured_rows(operation: OperationCurve) -> list[tuple[Value, ...]]:
    if not isinstance(operation.found, Points):
        return []
    series = operation.found.series
    rows: list[tuple[Value, ...]] = []
    for size, median, times in zip(series.sizes, series.medians, series.times, strict=True):
        rows.append(("median", size, median, None, None))
        rows += [("block", size, seconds, None, None) for seconds in times]
    return rows


def _size_text(size: float, unit: str) -> str:
    return format_bytes(round(size)) if unit == "bytes" else f"{size:,.0f} {unit}"


def _size_title(operation: OperationCurve) -> str:
    titles = {
        "bytes": "input of one rank" if operation.kind == "collective" else "size",
        "rows": "rows of one expert",
        "MACs": "multiply-accumulates",
    }
    return titles.get(operation.unit, operation.unit)


def _words(operation: OperationCurve) -> str:
    if not isinstance(operation.found, Points):
        return (
            f"{operation.name} has a line and no measured points: the band follows from assumed "
            "errors of its start-up time and its rate."
        )
    return (
        f"{operation.name} at {operation.num_points} sizes. The curve follows the medians and "
        "never falls; 90 % of draws from the measurement's noise and the fit's error lie in the "
        "band."
    )
