"""Figures hold the numbers of the values they are drawn from."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.app.subjects import LayerSubject
from moetune.app.views.observed import drift_figure, rolling_median, sound_rows
from moetune.app.views.plan import plan_sections
from moetune.domain.plan import Plan
from moetune.domain.records import Stored
from moetune.fit.costs import costs_of
from moetune.report.html import STATIC
from moetune.report.marks import ROLES, Bars, Line, Points
from moetune.report.plan_figures import timeline_figure
from moetune.report.section import Figure
from moetune.solve.trace import plan_timelines
from tests.report.lab import lab_plan, lab_profile, observations


def series(figure: Figure, name: str) -> Line | Points:
    """Return the series of that name."""
    marks = [mark for panel in figure.panels for mark in panel.marks]
    return next(one for one in marks if isinstance(one, Line | Points) and one.name == name)


def kept(plan: Plan, count: int) -> list[Stored[Any]]:
    found = observations(plan, count)
    return [
        Stored(id=at + 1, created_at=f"2026-11-20T{at // 60:02}:{at % 60:02}:00.000", value=one)
        for at, one in enumerate(found)
    ]


def figures() -> Iterator[Figure]:
    found = sound_rows(kept(lab_plan(), 40))
    layer = LayerSubject(plan=lab_plan(), profile=lab_profile())
    for section in plan_sections(layer, is_page=True):
        yield from section.figures
    yield drift_figure(found)


def test_every_role_of_the_theme_has_a_light_and_a_dark_value() -> None:
    sheet = (STATIC / "moetune.css").read_text()
    for role in ROLES:
        assert re.search(rf"--{role}: light-dark\(#\w+, #\w+\);", sheet), role


def test_the_timeline_has_every_span_and_ends_when_the_plan_says() -> None:
    plan = lab_plan()
    forward, backward = plan_timelines(plan=plan, costs=costs_of(lab_profile()))
    panels = timeline_figure(forward=forward, backward=backward).panels
    for panel, timeline, seconds in (
        (panels[0], forward, plan.predicted.forward_seconds),
        (panels[1], backward, plan.predicted.backward_seconds),
    ):
        bars = [mark for mark in panel.marks if isinstance(mark, Bars)]
        assert sum(len(one.lengths) for one in bars) == len(timeline.spans)
        spans = [span for one in bars for span in zip(one.starts, one.lengths, strict=True)]
        assert panel.x.title == "ms"
        assert max(map(sum, spans)) == pytest.approx(1e3 * seconds)


@given(st.lists(st.floats(0.5, 2), min_size=1, max_size=60), st.integers(1, 25))
def test_the_rolling_median_is_that_of_the_last_values(values: list[float], window: int) -> None:
    expected = [np.median(values[max(0, at - window + 1) : at + 1]) for at in range(len(values))]
    assert rolling_median(values, window) == pytest.approx(expected)


def test_drift_is_found_where_steps_become_slower() -> None:
    found = sound_rows(kept(lab_plan(), 600))
    figure = drift_figure(found)
    drift = [float(value) for value in series(figure, "median of 21").y]
    assert drift[280] == pytest.approx(1 / 1.01 - 1, abs=0.02)
    assert drift[-1] == pytest.approx(1 / 1.12 - 1, abs=0.02)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(first: str, second: str) -> float:
    light, dark = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_is_readable_on_what_it_stands_on(theme: int) -> None:
    sheet = (STATIC / "moetune.css").read_text()
    colours = {
        name: pair[theme]
        for name, *pair in re.findall(r"--(\w+): light-dark\((#\w+), (#\w+)\)", sheet)
    }
    pairs: Sequence[tuple[str, str]] = [
        *((text, ground) for text in ("ink", "muted", "accent", "warn")
          for ground in ("page", "surface", "raised")),
        ("surface", "accent"), ("surface", "second"), ("ink", "third"),
    ]  # fmt: skip
    for text, ground in pairs:
        ratio = _contrast(colours[text], colours[ground])
        assert ratio >= 4.5, f"{text} on {ground}: {ratio:.2f}"
