"""Figure of observed steps: the error of their predictions over time."""

import statistics
from collections.abc import Iterable, Sequence

from moetune.domain.records import Observation, Stored
from moetune.domain.storable import is_sound
from moetune.domain.units import format_seconds
from moetune.report.axes import Axis
from moetune.report.marks import Line, Panel, Points
from moetune.report.section import Figure, Value, percent, plural

WINDOW = 21
"""Observations in the rolling median: enough that a few slow steps do not move it."""
MOST_POINTS = 600
_HEADER = (
    "id", "time_utc", "plan", "source", "tokens_per_rank", "forward_degree", "backward_degree",
    "predicted_seconds", "observed_seconds", "error", "median_error",
)  # fmt: skip


def sound_rows(rows: Iterable[Stored[Observation]]) -> tuple[Stored[Observation], ...]:
    """Return the observations that can be drawn, oldest first; of others errors may overflow."""
    return tuple(sorted((one for one in rows if is_sound(one.value)), key=lambda one: one.id))


def errors_of(rows: Sequence[Stored[Observation]]) -> list[float]:
    """Return the errors of the rows' predictions; 0 where nothing was predicted."""
    return [row.value.error or 0.0 for row in rows]


def drift_figure(rows: Sequence[Stored[Observation]]) -> Figure:
    """Return errors of predictions, of one plan or many, with their rolling median.

    Args:
        rows: of `sound_rows`, at least one.
    """
    errors = errors_of(rows)
    drift = rolling_median(errors, WINDOW)
    shown = thinned(errors, MOST_POINTS)
    times = tuple(rows[at].created_at[:23] for at in shown)
    latest = rows[-1].value
    thinning = f" {len(shown):,} points are drawn, with all extremes; the CSV file has all points."
    single = Points(
        name="single", color="second/0.55", size=5, x=times,
        y=tuple(errors[at] for at in shown), hover=tuple(_words(rows[at]) for at in shown),
    )  # fmt: skip
    median = Line(name=f"median of {WINDOW}", x=times, y=tuple(drift[at] for at in shown))
    axes = Axis(title="time, UTC", kind="date"), Axis(title="relative error", is_share=True)
    return Figure(
        name="drift",
        is_wide=True,
        is_low=True,
        title="Drift",
        words=(
            f"{plural(len(rows), 'observation')}; the latest step took "
            f"{format_seconds(latest.median_seconds)}, predicted were "
            f"{format_seconds(latest.predicted_seconds)}. "
            "Predicted over observed, minus 1: below 0 for slower steps. The line is the median "
            f"of the last {WINDOW} observations and ends at {percent(drift[-1], sign=True)}. If it "
            "stays away from 0, the machine's speed is "
            f"no longer that of the profile.{thinning if len(shown) < len(rows) else ''}"
        ),
        panels=(Panel(x=axes[0], y=axes[1], marks=(single, median)),),
        header=_HEADER,
        rows=tuple(
            (*_values(row), error, rolling)
            for row, error, rolling in zip(rows, errors, drift, strict=True)
        ),
    )


def rolling_median(values: Sequence[float], window: int) -> list[float]:
    """Return for each value the median of it and up to `window` - 1 values before it."""
    return [
        statistics.median(values[max(0, at + 1 - window) : at + 1]) for at in range(len(values))
    ]


def thinned(values: Sequence[float], most: int) -> list[int]:
    """Return the indices of at most `most` values to draw, in order, without losing an outlier.

    They are the smallest and the largest value of each of equal stretches, and both ends.
    """
    count = len(values)
    if count <= most:
        return list(range(count))
    stretches = max(1, (most - 2) // 2)
    chosen = {0, count - 1}
    for stretch in range(stretches):
        part = range(stretch * count // stretches, (stretch + 1) * count // stretches)
        chosen |= {min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    return sorted(chosen)


def _values(row: Stored[Observation]) -> tuple[Value, ...]:
    step = row.value
    return (
        row.id, row.created_at[:23], step.plan_id, step.source, step.tokens_per_rank,
        step.forward_degree, step.backward_degree, step.predicted_seconds, step.median_seconds,
    )  # fmt: skip


def _words(row: Stored[Observation]) -> str:
    step = row.value
    return (
        f"{row.created_at[:23]}\n{format_seconds(step.median_seconds)}, predicted "
        f"{format_seconds(step.predicted_seconds)}\nplan {step.plan_id[:6]}, {step.source}"
    )
