"""Figures drawn without a script: marks stand where their numbers are, in any window."""

import re
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.report.marks import SPAN, paint
from moetune.report.observed import drift_figure, seen
from moetune.report.plan_figures import Option, pareto_figure, stacked_figure
from moetune.report.scales import scale_of
from moetune.report.section import Figure
from moetune.report.svg import figure_svg
from moetune.report.theme import axis, drawing
from moetune.report.timelines import passes_figure
from moetune.solve.training.pipeline import StagePipeline, StageSeconds, pass_spans
from tests.report.lab import lab_plan
from tests.report.test_figures import figures, kept


def parsed(figure: Figure) -> ET.Element:
    """Return the drawing's elements; it must be well formed."""
    return ET.fromstring(f"<div>{figure_svg(figure)}</div>")  # noqa: S314 - our own


def area_of(figure: Figure) -> ET.Element:
    found = parsed(figure).find(".//svg[@class='area']")
    assert found is not None
    return found


def share(element: ET.Element, name: str) -> float:
    return float(element.attrib[name].removesuffix("%")) / 100


def title_of(element: ET.Element) -> str:
    return element.findtext("title") or ""


@pytest.fixture(scope="module")
def drawn() -> dict[str, Figure]:
    return {one.name: one for one in figures()}


def test_every_figure_is_drawn_in_colours_of_the_theme_alone() -> None:
    for figure in figures():
        text = figure_svg(figure)
        ET.fromstring(f"<div>{text}</div>")  # noqa: S314 - our own
        painted = re.findall(r'(?:fill|stroke)="([^"]*)"', text)
        assert painted
        assert all(re.fullmatch(r"var\(--\w+\)|none", one) for one in painted)
        assert "style=" not in text
        assert "nan" not in text.lower()


def test_stacked_bars_begin_where_the_one_before_ends_and_are_as_long_as_their_seconds() -> None:
    parts = {
        "first": {"forward": 1.0, "backward": 3.0},
        "second": {"forward": 2.0, "backward": 0.0},
    }
    figure = stacked_figure(parts, title="T", words="w")
    bars = list(area_of(figure).iter("rect"))
    (first, second, third, _) = [(share(one, "x"), share(one, "width")) for one in bars]
    assert first[0] == second[0] == 0.0
    assert second[1] == pytest.approx(2 * first[1], abs=1e-3)
    assert third[0] == pytest.approx(first[0] + first[1], abs=1e-3)
    assert third[1] == pytest.approx(3 * first[1], abs=1e-3)
    tops = [float(one.attrib["y"]) for one in bars]
    assert tops[0] == tops[2] < tops[1]
    assert [title_of(one) for one in bars[:2]] == ["forward: 1.00 s", "forward: 2.00 s"]


def test_points_stand_in_the_order_of_their_numbers_and_the_front_goes_through_its_own() -> None:
    options = [
        Option(name=f"o{at}", group="g", step_seconds=time, memory_bytes=size, is_chosen=at == 2)
        for at, (time, size) in enumerate([(0.4, 100), (0.3, 200), (0.1, 300)])
    ]
    figure = pareto_figure(options, limit_bytes=320)
    circles = list(area_of(figure).iter("circle"))
    places = {title_of(one).splitlines()[0]: one for one in circles}
    left = [share(places[f"o{at}"], "cx") for at in range(3)]
    down = [float(places[f"o{at}"].attrib["cy"]) for at in range(3)]
    assert left[1] - left[0] == pytest.approx(left[2] - left[1], abs=1e-3)
    assert (down[2] - down[1]) == pytest.approx(2 * (down[1] - down[0]), abs=0.2)
    (path,) = [one for one in area_of(figure).iter("path") if one.get("class") == "line"]
    corners = [tuple(map(float, one.split())) for one in path.attrib["d"][1:].split("L")]
    assert corners[0] == pytest.approx((SPAN * left[0], down[0]), abs=0.2)
    assert corners[-1] == pytest.approx((SPAN * left[2], down[2]), abs=0.2)
    assert "limit" in "".join(area_of(figure).itertext())


def test_a_pipelines_passes_stand_in_the_rows_of_their_stages() -> None:
    stage = StageSeconds(forward=1.0, grad_input=1.0, grad_weight=1.0)
    pipeline = StagePipeline(
        schedule="1f1b", pp=3, stages=(stage,) * 3, num_micro_batches=4, send_seconds=0.0,
        hides_sends=False,
    )  # fmt: skip
    figure = passes_figure(pass_spans(pipeline, 4), words="w")
    bars = {title_of(one).splitlines()[0]: one for one in area_of(figure).iter("rect")}
    assert len(bars) == 3 * 4 * 2
    ends = max(float(str(row[3])) for row in figure.rows)
    for row in figure.rows:
        stage_name, name, start, end = row
        bar = bars[f"{stage_name}, {name}"]
        assert share(bar, "x") == pytest.approx(float(str(start)) / (1.01 * ends), abs=1e-4)
        wide = (float(str(end)) - float(str(start))) / (1.01 * ends)
        assert share(bar, "width") == pytest.approx(wide, abs=1e-4)


def test_names_of_users_stay_text() -> None:
    strange = "</svg><script>alert(1)</script>"
    figure = stacked_figure({strange: {"forward": 1.0}}, title=strange, words="w")
    assert "<script" not in figure_svg(figure)
    assert strange in "".join(parsed(figure).itertext())


def test_the_legend_names_every_series_and_one_series_needs_none(
    drawn: Mapping[str, Figure],
) -> None:
    for figure in drawn.values():
        traces: Any = figure.drawing["data"]
        series = dict.fromkeys(one["name"] for one in traces if one.get("name"))
        legend = parsed(figure).findall(".//li")
        assert ["".join(one.itertext()) for one in legend] == list(series)
    one = stacked_figure({"a": {"forward": 1.0}}, title="T", words="w")
    assert parsed(one).find(".//li") is None


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), to_zero=st.booleans())
def test_every_value_of_a_linear_axis_is_inside_it(values: list[float], *, to_zero: bool) -> None:
    scale = scale_of(axis("x", **({"rangemode": "tozero"} if to_zero else {})), values)
    assert all(-1e-6 <= scale.share(one) <= 1 + 1e-6 for one in values)
    if to_zero:
        assert -1e-6 <= scale.share(0.0) <= 1 + 1e-6


@given(st.floats(1e-6, 1e6), st.floats(1.0001, 1e4))
def test_ticks_are_round_evenly_apart_and_tell_their_places(low: float, factor: float) -> None:
    scale = scale_of(axis("x"), [low, low * factor])
    ticks = scale.ticks(axis("x"))
    assert 2 <= len(ticks) <= 8
    values = [float(one.text.replace(",", "")) for one in ticks]
    assert len(set(values)) == len(values)
    for tick, value in zip(ticks, values, strict=True):
        assert scale.share(value) == pytest.approx(tick.share, abs=0.02)


def test_dates_have_days_or_hours_as_their_span_needs() -> None:
    def labels(*dates: str) -> list[str]:
        place = axis("time", type="date")
        return [one.text for one in scale_of(place, dates).ticks(place)]

    assert labels("2026-11-17T00:00:00.000", "2026-11-25T00:00:00.000")[0] == "Nov 17"
    assert "12:30" in labels("2026-11-17T12:10:00.000", "2026-11-17T13:30:00.000")
    assert "12:10:15" in labels("2026-11-17T12:10:02.000", "2026-11-17T12:11:00.000")
    assert 2 <= len(labels("2026-11-17T12:10:00.000")) <= 7


def test_drift_has_percentages_and_a_line_at_zero() -> None:
    figure = drift_figure(seen(kept(lab_plan(), 60)))
    labels = [one.text or "" for one in parsed(figure).iter("text")]
    assert "0%" in labels
    assert any(re.fullmatch(r"-\d+%", one) for one in labels)
    assert any(one.get("class") == "zero" for one in area_of(figure).iter("line"))


def test_what_is_not_drawn_is_refused() -> None:
    trace: dict[str, Any] = {"type": "pie", "x": [], "y": []}
    figure = Figure(
        name="f", title="F", words="", header=("x",), rows=((1,),),
        drawing=drawing([trace], x=axis("x"), y=axis("y")),
    )  # fmt: skip
    with pytest.raises(ValueError, match="pie"):
        figure_svg(figure)
    with pytest.raises(ValueError, match="red"):
        paint("red")
