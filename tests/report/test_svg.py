"""Figures drawn without a script: marks stand where their numbers are, in any window."""

import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.report.figure import Axis, Bar, Figure, Point, Scale, Series
from moetune.report.svg import figure_svg
from tests.report.test_figures import figures


def parsed(figure: Figure) -> ET.Element:
    """Return the drawing's elements; it must be well formed."""
    return ET.fromstring(f"<div>{figure_svg(figure)}</div>")  # noqa: S314 - our own


def area_of(figure: Figure) -> ET.Element:
    area = parsed(figure).find(".//svg[@class='area']")
    assert area is not None
    return area


def share(element: ET.Element, name: str) -> float:
    return float(element.attrib[name].removesuffix("%")) / 100


def test_every_figure_is_drawn_in_colours_of_the_theme_alone() -> None:
    for figure in figures():
        text = figure_svg(figure)
        ET.fromstring(f"<div>{text}</div>")  # noqa: S314 - our own
        painted = re.findall(r'(?:fill|stroke)="([^"]*)"', text)
        assert painted
        assert all(re.fullmatch(r"var\(--\w+\)|none", colour) for colour in painted)
        assert "style=" not in text
        assert "nan" not in text.lower()


def bars_figure(*bars: Bar) -> Figure:
    series = Series(bars=bars, text_color="ink")
    return Figure(name="f", title="T", x=Axis(end=4.0), series=(series,))


def test_bars_begin_where_they_start_and_are_as_long_as_their_seconds() -> None:
    figure = bars_figure(
        Bar("first", 0.0, 1.0, hover="short"), Bar("second", 1.0, 3.0, hover="long")
    )
    bars = list(area_of(figure).iter("rect"))
    places = [(share(bar, "x"), share(bar, "width")) for bar in bars]
    assert places == [(0.0, 0.25), (0.25, 0.75)]
    assert float(bars[0].attrib["y"]) < float(bars[1].attrib["y"])
    assert [bar.findtext("title") for bar in bars] == ["short", "long"]


def test_points_and_their_line_stand_where_their_numbers_are() -> None:
    points = (Point(100.0, 0.4), Point(200.0, 0.3), Point(300.0, 0.1))
    series = (Series(points=points, size=8), Series(points=points))
    figure = Figure(name="f", title="F", x=Axis(), y=Axis(), series=series)
    circles = list(area_of(figure).iter("circle"))
    left = [share(circle, "cx") for circle in circles]
    down = [float(circle.attrib["cy"]) for circle in circles]
    assert left[1] - left[0] == pytest.approx(left[2] - left[1], abs=1e-3)
    assert (down[2] - down[1]) == pytest.approx(2 * (down[1] - down[0]), abs=0.2)
    lines = [line for line in area_of(figure).iter("line") if "stroke" in line.attrib]
    starts = [(share(line, "x1"), float(line.attrib["y1"])) for line in lines]
    ends = [(share(line, "x2"), float(line.attrib["y2"])) for line in lines]
    places = list(zip(left, down, strict=True))
    assert (starts, ends) == (places[:-1], places[1:])


def test_names_of_users_stay_text() -> None:
    strange = "</svg><script>alert(1)</script>"
    figure = bars_figure(Bar(strange, 0.0, 4.0, text=strange, hover=strange))
    assert "<script" not in figure_svg(figure)
    assert strange in "".join(parsed(figure).itertext())


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_every_value_of_a_linear_axis_is_inside_it(values: list[float]) -> None:
    scale = Scale.of(Axis(), values)
    assert all(-1e-6 <= scale.share(value) <= 1 + 1e-6 for value in values)


@given(st.floats(1e-6, 1e6), st.floats(1.0001, 1e4))
def test_ticks_are_round_evenly_apart_and_tell_their_places(low: float, factor: float) -> None:
    scale = Scale.of(Axis(), [low, low * factor])
    ticks = [*scale.ticks()]
    assert 2 <= len(ticks) <= 8
    values = [float(tick.text.replace(",", "")) for tick in ticks]
    assert len(set(values)) == len(values)
    for tick, value in zip(ticks, values, strict=True):
        assert scale.share(value) == pytest.approx(tick.share, abs=0.02)
