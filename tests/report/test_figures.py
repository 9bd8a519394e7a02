"""Figures hold the numbers of the values they are drawn from."""

import csv
import io
import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.app.subjects import LayerSubject
from moetune.app.views.layer_reasons import options_of
from moetune.app.views.observed import drift_figure, rolling_median, sound_rows
from moetune.app.views.plan import plan_sections
from moetune.domain.cost_keys import CollectiveKey
from moetune.domain.plan import Plan
from moetune.domain.records import Stored
from moetune.fit.costs import costs_of
from moetune.fit.variants import NUM_RESAMPLES, RESAMPLING_SEED, resample_costs
from moetune.report.html import STATIC
from moetune.report.marks import ROLES, Bars, Line, Points
from moetune.report.operations import OperationCurve, fit_figure, operations_of
from moetune.report.plan_figures import (
    Option,
    degree_figure,
    pareto_figure,
    pareto_front,
    phases_figure,
    timeline_figure,
)
from moetune.report.section import Figure, all_figures
from moetune.solve.trace import plan_timelines
from tests.report.lab import lab_plan, lab_profile, observations


def operation(name: str) -> OperationCurve:
    return next(one for one in operations_of(lab_profile()) if one.name == name)


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
    for one in operations_of(lab_profile()):
        yield fit_figure(one)
    layer = LayerSubject(plan=lab_plan(), profile=lab_profile())
    yield from all_figures(plan_sections(layer, is_page=True))
    yield phases_figure({"one": lab_plan(), "other": lab_plan(1024)})
    yield degree_figure({"one": lab_plan(), "other": lab_plan(1024)})
    yield drift_figure(found)


@pytest.fixture(scope="module")
def drawn() -> list[Figure]:
    return list(figures())


def test_every_role_of_the_theme_has_a_light_and_a_dark_value() -> None:
    sheet = (STATIC / "moetune.css").read_text()
    for role in ROLES:
        assert re.search(rf"--{role}: light-dark\(#\w+, #\w+\);", sheet), role


def test_every_row_has_the_columns_of_its_header_and_survives_csv(drawn: list[Figure]) -> None:
    for figure in drawn:
        assert figure.rows, figure.title
        header, *rows = csv.reader(io.StringIO(figure.csv))
        assert tuple(header) == figure.header
        assert len(rows) == len(figure.rows)
        for text, row in zip(rows, figure.rows, strict=True):
            for cell, value in zip(text, row, strict=True):
                if isinstance(value, float):
                    assert float(cell) == value
                else:
                    assert cell == ("" if value is None else str(value))


def test_the_fit_shows_the_measured_medians_and_a_curve_through_them() -> None:
    shown = operation("all_to_all, 8 ranks on 2 nodes")
    figure = fit_figure(shown)
    medians = series(figure, "medians")
    for size, seconds in zip(medians.x, medians.y, strict=True):
        raw = [
            one
            for sample in lab_profile().samples
            if getattr(sample.point, "group_size", 0) == 8
            and getattr(sample.point, "in_flight", 0) == 1
            and getattr(sample.point, "num_bytes", 0) == size
            for one in sample.seconds
        ]
        assert seconds == statistics.median(raw)
    predicted = series(figure, "predicted")
    costs = costs_of(lab_profile())
    for size, seconds in zip(predicted.x, predicted.y, strict=True):
        assert isinstance(size, float)
        found = costs.seconds(CollectiveKey("all_to_all", 8), size)
        assert seconds == pytest.approx(found.seconds, rel=1e-12)


def test_the_band_is_that_of_the_draws_a_plan_is_judged_by() -> None:
    figure = fit_figure(operation("all_to_all, 8 ranks on 2 nodes"))
    draws = resample_costs(lab_profile(), num=NUM_RESAMPLES, seed=RESAMPLING_SEED)
    rows = [row for row in figure.rows if row[0] == "predicted"][::7]
    for _, size, seconds, low, high in rows:
        assert isinstance(size, float)
        assert isinstance(seconds, float)
        found = [one.seconds(CollectiveKey("all_to_all", 8), size).seconds for one in draws]
        assert (low, high) == pytest.approx(tuple(np.percentile(found, (5, 95))))
        assert isinstance(low, float)
        assert isinstance(high, float)
        assert low < seconds < high


def test_the_timeline_has_every_span_and_ends_when_the_plan_says() -> None:
    plan = lab_plan()
    forward, backward = plan_timelines(plan=plan, costs=costs_of(lab_profile()))
    figure = timeline_figure(forward=forward, backward=backward)
    assert len(figure.rows) == len(forward.spans) + len(backward.spans)
    for phase, seconds in (
        ("forward", plan.predicted.forward_seconds),
        ("backward", plan.predicted.backward_seconds),
    ):
        ends = [row[5] for row in figure.rows if row[0] == phase]
        assert max(float(end or 0) for end in ends) == pytest.approx(seconds)
    bars = [mark for panel in figure.panels for mark in panel.marks if isinstance(mark, Bars)]
    assert sum(len(one.lengths) for one in bars) == len(figure.rows)


option = st.builds(
    Option, name=st.just("x"), group=st.just("g"),
    step_seconds=st.sampled_from([0.1, 0.2, 0.3, 0.4, 0.5]), memory_bytes=st.integers(1, 6),
)  # fmt: skip


@given(st.lists(option, min_size=1, max_size=12))
def test_the_pareto_front_is_what_no_other_option_beats(options: list[Option]) -> None:
    def beats(one: Option, other: Option) -> bool:
        no_worse = one.step_seconds <= other.step_seconds and one.memory_bytes <= other.memory_bytes
        return no_worse and (
            one.step_seconds < other.step_seconds or one.memory_bytes < other.memory_bytes
        )

    expected = {
        (one.memory_bytes, one.step_seconds)
        for one in options
        if not any(beats(other, one) for other in options)
    }
    front = pareto_front(options)
    assert [(one.memory_bytes, one.step_seconds) for one in front] == sorted(expected)


def test_the_plan_is_among_its_options_with_its_own_time_and_memory() -> None:
    for plan in (lab_plan(), lab_plan(memory_limit_bytes=120 * 2**20)):
        options = [*options_of(LayerSubject(plan=plan, profile=lab_profile()))]
        (chosen,) = [one for one in options if one.is_chosen]
        assert chosen.memory_bytes == plan.memory.peak_bytes
        assert chosen.step_seconds == pytest.approx(plan.predicted.step_seconds)
        assert len(options) > 8
        figure = pareto_figure(options, limit_bytes=plan.inputs.memory_limit_bytes)
        assert [row[0] for row in figure.rows if row[5] == "yes"] == [chosen.name]


@given(st.lists(st.floats(0.5, 2), min_size=1, max_size=60), st.integers(1, 25))
def test_the_rolling_median_is_that_of_the_last_values(values: list[float], window: int) -> None:
    expected = [np.median(values[max(0, at - window + 1) : at + 1]) for at in range(len(values))]
    assert rolling_median(values, window) == pytest.approx(expected)


def test_drift_is_found_where_steps_become_slower() -> None:
    found = sound_rows(kept(lab_plan(), 600))
    figure = drift_figure(found)
    drift = [float(row[-1] or 0) for row in figure.rows]
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
