"""Figures of observed steps: predicted against observed over time, and the machine's drift."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from moetune.domain.records import Observation, Stored, prediction_error
from moetune.domain.storable import is_sound
from moetune.domain.units import format_seconds
from moetune.report.axes import Axis, seconds_unit
from moetune.report.marks import Line, Panel, Points
from moetune.report.section import Figure, Value, percent, plural

WINDOW = 21
"""Observations in the rolling median: enough that a few slow steps do not move it."""
MOST_POINTS = 600
_TIME = Axis(title="time, UTC", kind="date")
HEADER = (
    "id", "time_utc", "plan", "source", "tokens_per_rank", "forward_degree", "backward_degree",
    "predicted_seconds", "observed_seconds", "observed_over_predicted",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One observation with the median of its steps.

    Args:
        at: time of storing, UTC, ISO 8601.
        seconds: the median of its steps.
    """

    id: int
    at: str
    observation: Observation
    seconds: float

    @property
    def ratio(self) -> float:
        """Observed over predicted."""
        predicted = self.observation.predicted_seconds
        return self.seconds / predicted if predicted else 1.0

    @property
    def error(self) -> float:
        """Error of the prediction; 0 where nothing was predicted."""
        predicted = self.observation.predicted_seconds
        return prediction_error(predicted, self.seconds) if predicted else 0.0

    @property
    def row(self) -> tuple[Value, ...]:
        """The values of the columns in `HEADER`."""
        one = self.observation
        return (
            self.id, self.at, one.plan_id, one.source, one.tokens_per_rank, one.forward_degree,
            one.backward_degree, one.predicted_seconds, self.seconds, self.ratio,
        )  # fmt: skip


def seen(rows: Sequence[Stored[Observation]]) -> tuple[Seen, ...]:
    """Return the observations that can be drawn, oldest first; of others ratios may overflow."""
    return tuple(
        Seen(
            id=one.id, at=one.created_at[:23], observation=one.value,
            seconds=statistics.median(one.value.seconds),
        )
        for one in sorted(rows, key=lambda one: one.id)
        if is_sound(one.value)
    )  # fmt: skip


def observed_figure(found: Sequence[Seen]) -> Figure:
    """Return observed and predicted steps of one plan over time."""
    shown = thinned([one.seconds for one in found], MOST_POINTS)
    second, unit = seconds_unit(min(one.seconds for one in found))
    some = [found[at] for at in shown]
    return Figure(
        name="observed",
        is_wide=True,
        is_low=True,
        title="Predicted against observed",
        words=(
            f"{plural(len(found), 'observation')}; the latest step took "
            f"{format_seconds(found[-1].seconds)}, predicted were "
            f"{format_seconds(found[-1].observation.predicted_seconds)}."
            f"{_thinning(len(found), len(shown))}"
        ),
        panels=(
            Panel(
                x=_TIME,
                y=Axis(title=f"one step, {unit}", from_zero=True),
                marks=(
                    _points("observed", some, [one.seconds / second for one in some]),
                    Line(
                        name="predicted", color="ink", width=1.5, has_steps=True,
                        x=tuple(one.at for one in some),
                        y=tuple(one.observation.predicted_seconds / second for one in some),
                    ),
                ),
            ),
        ),
        header=HEADER,
        rows=tuple(one.row for one in found),
    )  # fmt: skip


def drift_figure(found: Sequence[Seen]) -> Figure:
    """Return errors of predictions, of one plan or many, with their rolling median."""
    shown = thinned([one.error for one in found], MOST_POINTS)
    drift = rolling_median([one.error for one in found], WINDOW)
    some = [found[at] for at in shown]
    return Figure(
        name="drift",
        is_wide=True,
        is_low=True,
        title="Drift",
        words=(
            "Predicted over observed, minus 1: below 0 for slower steps. The line is the median "
            f"of the last {WINDOW} observations and ends at {percent(drift[-1], sign=True)}. If it "
            "stays away from 0, the machine's speed is "
            f"no longer that of the profile.{_thinning(len(found), len(shown))}"
        ),
        panels=(
            Panel(
                x=_TIME,
                y=Axis(title="relative error", is_share=True),
                marks=(
                    _points("single", some, [one.error for one in some]),
                    Line(
                        name=f"median of {WINDOW}", x=tuple(one.at for one in some),
                        y=tuple(drift[at] for at in shown),
                    ),
                ),
            ),
        ),
        header=(*HEADER, "error", "median_error"),
        rows=tuple(
            (*one.row, one.error, rolling) for one, rolling in zip(found, drift, strict=True)
        ),
    )  # fmt: skip


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


def _points(name: str, some: Sequence[Seen], y: Sequence[float]) -> Points:
    return Points(
        name=name, color="second/0.55", size=5, x=tuple(one.at for one in some), y=tuple(y),
        hover=tuple(
            f"{one.at}\n{format_seconds(one.seconds)}, predicted "
            f"{format_seconds(one.observation.predicted_seconds)}\n"
            f"plan {one.observation.plan_id[:6]}, {one.observation.source}"
            for one in some
        ),
    )  # fmt: skip


def _thinning(count: int, shown: int) -> str:
    if shown == count:
        return ""
    return f" {shown:,} points are drawn, with all extremes; the CSV file has all points."
