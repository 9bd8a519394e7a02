"""Figure of the drift alarm: times with the band that they are compared with, and its sums."""

import re
from collections.abc import Sequence

from moetune.domain.units import format_seconds
from moetune.fit.drift import LIMIT, Watched
from moetune.report.observed import MOST_POINTS, thinned
from moetune.report.section import Figure
from moetune.report.theme import axis, drawing, seconds_scale

_DOMAINS = ((0.46, 1.0), (0.0, 0.34))
_NOT_IN_NAMES = re.compile(r"[^a-z0-9]+")


def alarm_figure(
    name: str, at: Sequence[str], states: Sequence[Watched], *, title: str, words: str
) -> Figure:
    """Return a series' times over its band, and below it both sums with the alarm's limit.

    Args:
        name: the series, which becomes the figure's name.
        at: when each time was stored, UTC, ISO 8601.
    """
    certain = {index for index, one in enumerate(states) if one.drift is not None}
    shown = sorted(certain.union(thinned([one.seconds for one in states], MOST_POINTS)))
    scale, unit = seconds_scale(min(one.seconds for one in states))
    some = [(at[index][:23], states[index]) for index in shown]
    dates = [when for when, _ in some]
    time = axis("time, UTC", type="date")
    above = {"title": {"text": ""}, "showticklabels": False, "matches": "x2", "anchor": "y"}
    return Figure(
        name=f"alarm-{_NOT_IN_NAMES.sub('-', name.lower()).strip('-')}",
        is_wide=True,
        title=title,
        words=words,
        drawing=drawing(
            [*_times(some, scale), *_sums(dates, some)],
            x={**time, **above},
            y=axis(unit, domain=list(_DOMAINS[0])),
            xaxis2={**time, "anchor": "y2"},
            yaxis2=axis("sum", domain=list(_DOMAINS[1]), rangemode="tozero"),
        ),
        header=(
            "time_utc", "id", "seconds", "before_seconds", "low_seconds", "high_seconds",
            "sum_longer", "sum_shorter", "alarm",
        ),
        rows=tuple(
            (
                when, one.step, one.seconds, one.before_seconds,
                *(one.band_seconds or (None, None)),
                one.longer, one.shorter, "yes" if one.drift is not None else "no",
            )
            for when, one in zip(at, states, strict=True)
        ),
    )  # fmt: skip


def _times(some: Sequence[tuple[str, Watched]], scale: float) -> list[dict[str, object]]:
    compared = [(when, one, one.band_seconds) for when, one in some if one.band_seconds]
    dates = [when for when, _, _ in compared]
    edge = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    band: list[dict[str, object]] = [
        {**edge, "x": dates, "y": [low / scale for _, _, (low, _) in compared],
         "showlegend": False},
        {**edge, "x": dates, "y": [high / scale for _, _, (_, high) in compared],
         "fill": "tonexty", "fillcolor": "@accent/0.16", "name": "adds to no sum"},
    ]  # fmt: skip
    certain = [(when, one) for when, one in some if one.drift is not None]
    points: list[dict[str, object]] = [
        {
            "type": "scatter", "mode": "markers", "name": name, "x": [when for when, _ in those],
            "y": [one.seconds / scale for _, one in those],
            "marker": marker, "text": [format_seconds(one.seconds) for _, one in those],
            "hovertemplate": "%{x}<br>%{text}<extra></extra>",
        }
        for name, those, marker in (
            ("time", some, {"color": "@second/0.55", "size": 5}),
            ("alarm", certain, {"color": "@accent", "size": 11, "symbol": "diamond",
                                "line": {"color": "@surface", "width": 1.5}}),
        )
        if those
    ]  # fmt: skip
    return [*(band if compared else ()), *points]


def _sums(dates: Sequence[str], some: Sequence[tuple[str, Watched]]) -> list[dict[str, object]]:
    common = {
        "type": "scatter", "mode": "lines", "hoverinfo": "skip", "xaxis": "x2", "yaxis": "y2",
    }  # fmt: skip
    ends = [dates[0], dates[-1]]
    return [
        {**common, "x": list(dates), "y": [one.longer for _, one in some],
         "name": "sum of longer", "line": {"color": "@accent", "width": 1.5}},
        {**common, "x": list(dates), "y": [one.shorter for _, one in some],
         "name": "of shorter", "line": {"color": "@second", "width": 1.5, "dash": "dot"}},
        {**common, "x": ends, "y": [LIMIT, LIMIT],
         "name": f"limit of {LIMIT:g}", "line": {"color": "@ink", "width": 1.5, "dash": "dash"}},
    ]  # fmt: skip
