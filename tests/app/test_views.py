"""A page has the tables of the screen, and a layer's options are its plan and those it beat."""

import re
from dataclasses import replace

import pytest

from moetune.app.subjects import LayerSubject, ModelSubject
from moetune.app.views.layer_reasons import memory_figures, options_of
from moetune.app.views.plan import explanation_sections, plan_sections
from moetune.report.section import all_figures
from tests.report.lab import lab_plan, lab_profile
from tests.training_plans import training_plan


@pytest.fixture(scope="module")
def layer() -> LayerSubject:
    return LayerSubject(plan=lab_plan(), profile=lab_profile())


def test_a_page_has_what_a_screen_has_and_figures_besides(layer: LayerSubject) -> None:
    screen = explanation_sections(layer)
    page = plan_sections(layer, is_page=True)
    tables = {table.name: table for section in page for table in section.tables}
    for section in screen:
        for table in section.tables:
            assert tables[table.name] == table
    assert not all_figures(screen)
    names = [figure.name for figure in all_figures(page)]
    assert len(names) == len(set(names)) > 2
    assert len({section.name for section in page}) == len(page)


def test_explanations_of_both_kinds_have_their_sections_in_one_order(layer: LayerSubject) -> None:
    order = ["plan", "why", "pins", "terms", "memory", "placement", "alternatives", "ranges"]
    for subject in (layer, ModelSubject(plan=training_plan())):
        *names, last = (section.name for section in explanation_sections(subject))
        assert last == "trust"
        assert names == [name for name in order if name in names]
        assert {"plan", "why", "terms", "memory", "alternatives"} <= {*names}


def test_options_of_a_layer_are_its_plan_and_powers_of_two_by_strategy(layer: LayerSubject) -> None:
    plan, options = layer.plan, [*options_of(layer)]
    first = options[0]
    assert [one.is_chosen for one in options] == [True] + [False] * (len(options) - 1)
    assert first.step_seconds == pytest.approx(plan.predicted.step_seconds)
    assert first.memory_bytes == plan.memory.peak_bytes
    ways = {
        (strategy, degree)
        for strategy in ("none", "S1", "S2", "S3", "S4")
        for degree in (1, 2, 4, 8)  # it is planned with 8 chunks at most
        if degree > 1 or strategy == "none"
    } | {(plan.memory.strategy, plan.pipeline.forward_degree)}
    found = [re.findall(r"none|S\d|\d+", one.name) for one in options]
    assert {(name, int(degree)) for name, degree in found} == ways
    assert len(options) == len(ways)
    assert {one.group for one in options} == {way[0] for way in ways}
    assert memory_figures(replace(layer, profile=None)) == ()
    known = {one.strategy: one.step_seconds for one in layer.strategies}
    assert min(one.step_seconds for one in options) >= min(known.values()) * (1 - 1e-9)
