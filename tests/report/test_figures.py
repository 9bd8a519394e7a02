"""Figures hold the numbers of the values they are drawn from."""

import re
from collections.abc import Iterator, Sequence

import pytest

from moetune.app.subjects import LayerSubject
from moetune.app.views.plan import plan_sections
from moetune.fit.costs import costs_of
from moetune.report.figure import ROLES, Figure
from moetune.report.plan_figures import timeline_figure
from moetune.report.svg import STATIC
from moetune.solve.trace import plan_timelines
from tests.report.lab import lab_plan, lab_profile


def figures() -> Iterator[Figure]:
    layer = LayerSubject(plan=lab_plan(), profile=lab_profile())
    for section in plan_sections(layer, is_page=True):
        yield from section.figures


def test_every_role_of_the_theme_has_a_light_and_a_dark_value() -> None:
    sheet = (STATIC / "moetune.css").read_text()
    for role in ROLES:
        assert re.search(rf"--{role}: light-dark\(#\w+, #\w+\);", sheet), role


def test_the_timeline_has_every_span_and_ends_when_the_plan_says() -> None:
    plan = lab_plan()
    forward, backward = plan_timelines(plan=plan, costs=costs_of(lab_profile()))
    figure = timeline_figure(forward, backward)
    assert figure.x.title == "ms"
    bars = [bar for series in figure.series for bar in series.bars]
    for phase, timeline, seconds in (
        ("forward", forward, plan.predicted.forward_seconds),
        ("backward", backward, plan.predicted.backward_seconds),
    ):
        of_phase = [bar for bar in bars if bar.row.startswith(phase)]
        assert len(of_phase) == len(timeline.spans)
        ends = (bar.start + bar.length for bar in of_phase)
        assert max(ends) == pytest.approx(1e3 * seconds)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


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
        dark, light = sorted(_luminance(colours[name]) for name in (text, ground))
        ratio = (light + 0.05) / (dark + 0.05)
        assert ratio >= 4.5, f"{text} on {ground}: {ratio:.2f}"
