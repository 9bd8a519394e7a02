"""A page has the tables of the screen, and a timeline besides."""

import pytest

from moetune.app.subjects import LayerSubject, ModelSubject
from moetune.app.views.plan import explanation_sections, plan_sections
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
    assert not [section for section in screen if section.figures]
    assert [figure.name for section in page for figure in section.figures] == ["timeline"]
    assert len({section.name for section in page}) == len(page)


def test_explanations_of_both_kinds_have_their_sections_in_one_order(layer: LayerSubject) -> None:
    order = ["plan", "why", "pins", "terms", "memory", "placement", "alternatives", "ranges"]
    for subject in (layer, ModelSubject(plan=training_plan(), model=None)):
        *names, last = (section.name for section in explanation_sections(subject))
        assert last == "trust"
        assert names == [name for name in order if name in names]
        assert {"plan", "why", "terms", "memory", "alternatives"} <= {*names}
