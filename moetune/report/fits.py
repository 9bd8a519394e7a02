"""Figures of fits: an operation's points, curve, band and residuals, and two profiles' curves."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from moetune.domain.units import format_bytes, format_seconds
from moetune.fit.curve import left_out_errors
from moetune.fit.index import Points as Measured
from moetune.fit.operations import Curves
from moetune.fit.variants import NUM_RESAMPLES, RESAMPLING_SEED, drawn_seconds
from moetune.report.axes import Axis, log_seconds, log_sizes
from moetune.report.marks import SERIES, Band, Line, Mark, Outline, Panel, Points
from moetune.report.operations import OperationCurve
from moetune.report.section import Figure, Value

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
    curve = _Curve.of(operation)
    return Figure(
        name="fit",
        is_wide=True,
        title=operation.name,
        words=_words(operation),
        panels=(
            Panel(
                x=_sizes_axis(operation),
                y=log_seconds("time of one"),
                marks=(
                    *curve.marks("predicted", band="5–95 %"),
                    *_measured(operation, curve.sizes),
                ),
            ),
        ),
        header=("kind", f"size_{operation.unit.lower()}", "seconds", "p05_seconds", "p95_seconds"),
        rows=(*_measured_rows(operation), *curve.rows("predicted")),
    )


def residual_figure(operation: OperationCurve) -> Figure | None:
    """Return the relative errors of predictions at the measured points; None without points.

    The curve is fitted without the predicted point; the α–β line to all points.
    """
    found = operation.found
    if not isinstance(found, Measured):
        return None
    series = found.series
    curve = left_out_errors(
        sizes=series.sizes, seconds=series.medians, alpha_seconds=found.alpha_seconds
    )
    if not curve:
        return None
    line = {
        at: operation.line.seconds(size) / seconds - 1
        for at, (size, seconds) in enumerate(zip(series.sizes, series.medians, strict=True))
        if operation.line
    }
    sized = series.sizes, operation.unit
    return Figure(
        name="residuals",
        is_low=True,
        title="Residuals",
        words=(
            "Relative error of the prediction at each measured median: by the curve without the "
            "point, and by the α–β line. The two ends of the curve are never left out."
        ),
        panels=(
            Panel(
                x=_sizes_axis(operation),
                y=Axis(title="relative error", is_share=True),
                marks=(
                    _residuals("α–β line", line, *sized, color="muted", outline="x"),
                    _residuals("curve, point left out", curve, *sized, color=SERIES[0]),
                ),
            ),
        ),
        header=(f"size_{operation.unit.lower()}", "curve_left_out", "alpha_beta_line"),
        rows=tuple(
            (size, curve.get(at), line.get(at)) for at, size in enumerate(series.sizes)
        ),
    )  # fmt: skip


def _residuals(
    name: str, errors: Mapping[int, float], all_sizes: Sequence[float], unit: str, *, color: str,
    outline: Outline | None = None,
) -> Points:  # fmt: skip
    """Return relative errors by the index of their size."""
    sizes = tuple(all_sizes[at] for at in errors)
    words = [_size_text(size, unit) for size in sizes]
    pairs = zip(words, errors.values(), strict=True)
    return Points(
        name=name, x=sizes, y=tuple(errors.values()), color=color, size=9, outline=outline,
        hover=tuple(f"{name}: {size}: {error:+.1%}" for size, error in pairs),
    )  # fmt: skip


def overlay_figure(first: OperationCurve, second: OperationCurve, names: tuple[str, str]) -> Figure:
    """Return the same operation of two profiles in one figure."""
    curves = tuple(zip(names, map(_Curve.of, (first, second)), SERIES, strict=False))
    return Figure(
        name=f"fit-{first.key}",
        title=first.name,
        words=f"Predicted times of {first.name} in both profiles, with their 5–95 % bands.",
        panels=(
            Panel(
                x=_sizes_axis(first),
                y=log_seconds("time of one"),
                marks=tuple(
                    mark for name, curve, color in curves for mark in curve.marks(name, color=color)
                ),
            ),
        ),
        header=("profile", f"size_{first.unit.lower()}", "seconds", "p05_seconds", "p95_seconds"),
        rows=tuple(row for name, curve, _ in curves for row in curve.rows(name)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Curve:
    """Predicted seconds by size, with the ends of their 5–95 % range."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    @classmethod
    def of(cls, operation: OperationCurve) -> "_Curve":
        sizes = _grid(operation)
        [seconds] = Curves().times(operation.found).seconds_at(np.array(sizes)).tolist()
        drawn = drawn_seconds(operation.found, sizes, num=NUM_RESAMPLES, seed=RESAMPLING_SEED)
        low, high = np.percentile(drawn, _BAND_PERCENT, axis=0).tolist()
        return cls(sizes=tuple(sizes), seconds=tuple(seconds), low=tuple(low), high=tuple(high))

    def marks(self, name: str, *, color: str = SERIES[0], band: str = "") -> tuple[Mark, ...]:
        """Return the band, which may have a name, and the line in it."""
        return (
            Band(x=self.sizes, low=self.low, high=self.high, name=band, color=f"{color}/0.16"),
            Line(x=self.sizes, y=self.seconds, name=name, color=color),
        )

    def rows(self, name: str) -> list[tuple[Value, ...]]:
        """Return the numbers behind a first column."""
        columns = zip(self.sizes, self.seconds, self.low, self.high, strict=True)
        return [(name, *row) for row in columns]


def _grid(operation: OperationCurve) -> list[float]:
    """Return sizes in even logarithmic steps, from half the smallest point to twice the largest."""
    found, error = operation.found, operation.error
    if isinstance(found, Measured):
        low, high = found.series.sizes[0] / 2, found.series.sizes[-1] * 2
    elif error is not None:
        low, high = error.low, error.high
    else:
        low, high = _UNMEASURED[operation.unit]
    steps = max(_LEAST_STEPS, round(_PER_OCTAVE * math.log2(high / low)))
    return [low * (high / low) ** (step / steps) for step in range(steps + 1)]


def _measured(operation: OperationCurve, sizes: tuple[float, ...]) -> Iterator[Mark]:
    """Yield what was measured: the α–β line, single times, and their medians on top."""
    if not isinstance(operation.found, Measured):
        return
    if (line := operation.line) is not None:
        seconds = tuple(line.seconds(size) for size in sizes)
        yield Line(name="α–β line", x=sizes, y=seconds, color="muted", is_dotted=True, width=1.5)
    series = operation.found.series
    yield Points(
        name="single blocks", color="second/0.35", size=4,
        x=tuple(
            size
            for size, times in zip(series.sizes, series.times, strict=True)
            for _ in times
        ),
        y=tuple(seconds for times in series.times for seconds in times),
    )  # fmt: skip
    yield Points(
        name="medians", color=SERIES[0], size=8, x=tuple(series.sizes), y=tuple(series.medians),
        hover=tuple(
            f"measured: {_size_text(size, operation.unit)}: {format_seconds(median)}"
            for size, median in zip(series.sizes, series.medians, strict=True)
        ),
    )  # fmt: skip


def _measured_rows(operation: OperationCurve) -> list[tuple[Value, ...]]:
    if not isinstance(operation.found, Measured):
        return []
    series = operation.found.series
    rows: list[tuple[Value, ...]] = []
    for size, median, times in zip(series.sizes, series.medians, series.times, strict=True):
        rows.append(("median", size, median, None, None))
        rows += [("block", size, seconds, None, None) for seconds in times]
    return rows


def _size_text(size: float, unit: str) -> str:
    return format_bytes(round(size)) if unit == "bytes" else f"{size:,.0f} {unit}"


def _sizes_axis(operation: OperationCurve) -> Axis:
    titles = {
        "bytes": "input of one rank" if operation.kind == "collective" else "size",
        "rows": "rows of one expert",
        "MACs": "multiply-accumulates",
    }
    return log_sizes(titles.get(operation.unit, operation.unit), unit=operation.unit)


def _words(operation: OperationCurve) -> str:
    if not isinstance(operation.found, Measured):
        return (
            f"{operation.name} has a line and no measured points: the band follows from assumed "
            "errors of its start-up time and its rate."
        )
    return (
        f"{operation.name} at {operation.num_points} sizes. The curve follows the medians and "
        "never falls; 90 % of draws from the measurement's noise and the fit's error lie in the "
        "band."
    )
