"""Figures hold the numbers of the values they are drawn from."""

import re
from collections.abc import Iterator

import pytest

from moetune.app.subjects import LayerSubject
from moetune.app.views.plan import plan_sections
from moetune.fit.costs import costs_of
from moetune.report.html import STATIC
from moetune.report.marks import ROLES, Bars
from moetune.report.plan_figures import timeline_figure
from moetune.report.section import Figure
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
