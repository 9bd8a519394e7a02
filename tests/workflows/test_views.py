"""What is shown of plans, profiles and comparisons has the numbers of what it is made from."""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import replace

import pytest

from moetune.domain.model import MODELS, WHOLE_MODELS
from moetune.domain.plan import Plan
from moetune.domain.profile import CollectiveLine, CopyLine, GemmLine, RowsLine
from moetune.huggingface.registry import registered_models
from moetune.report.section import (
    Figure,
    Section,
    Table,
    all_figures,
    values_of,
)
from moetune.workflows.explain import Explanation, explain_plan
from moetune.workflows.profiles import FoundProfile
from moetune.workflows.views.comparison import (
    machine_sections,
    plan_differences,
    whatif_sections,
)
from moetune.workflows.views.explanation import explanation_sections, reasons
from moetune.workflows.views.figures import (
    layer_figures,
    options_of,
)
from moetune.workflows.views.models import model_section, models_section, registry_section
from moetune.workflows.views.plan import page_sections, plan_sections
from moetune.workflows.views.profile import profile_page, profile_sections
from moetune.workflows.whatif import WhatIf, change_plan
from tests.report.lab import lab_plan, lab_profile


@pytest.fixture(scope="module")
def layer() -> Explanation:
    return explain_plan(lab_plan(), profile=lab_profile())


def table_of(sections: tuple[Section, ...], name: str) -> Table:
    return next(one for section in sections for one in section.tables if one.name == name)


def columns(table: Table, *names: str) -> list[tuple[object, ...]]:
    places = [table.header.index(name) for name in names]
    return [tuple(row[at].value for at in places) for row in table.rows]


def test_a_plan_shows_its_predicted_times_and_bytes(layer: Explanation) -> None:
    plan, forward, backward = layer.plan, layer.forward, layer.backward
    assert forward is not None
    assert backward is not None
    answer, uncertainty = plan_sections(layer)
    times = plan.predicted
    table = table_of((answer,), "phases")
    assert columns(table, "phase", "one chunk", "planned", "exposed communication") == [
        ("forward", times.sequential_forward_seconds, times.forward_seconds,
         forward.exposed_communication_seconds),
        ("backward", times.sequential_backward_seconds, times.backward_seconds,
         backward.exposed_communication_seconds),
        ("gate, sorting", times.overhead_seconds, times.overhead_seconds, None),
    ]  # fmt: skip
    assert layer.profile is not None
    with_launches = replace(
        layer,
        profile=replace(
            layer.profile,
            rows=(
                RowsLine(
                    op="chunked_layer", dtype="float32", alpha_seconds=1e-3,
                    beta_seconds_per_element=0.0,
                ),
            ),
        ),
    )  # fmt: skip
    named = table_of(plan_sections(with_launches)[:1], "phases")
    assert columns(named, "phase")[-1] == ("gate, sorting, launches",)
    shown = {one.name: one.cell.value for one in answer.highlights}
    assert shown == {
        "One step of the layer": times.step_seconds,
        "Against one chunk": times.sequential_step_seconds / times.step_seconds,
        "Model FLOP/s": times.model_flops_per_second_per_device,
        "Memory of one device": plan.memory.peak_bytes,
        "What binds": plan.decision.binding.capitalize(),
        "How sure": plan.decision.probability_best,
    }
    assert len(uncertainty.notes) == len(plan.warnings)


def test_an_explanation_shows_every_term_strategy_and_alternative(layer: Explanation) -> None:
    plan, sections = layer.plan, explanation_sections(layer)
    phases = (layer.forward, layer.backward)
    seconds = ("transfer", "experts", "all experts", "exposed", "hidden", "planned")
    assert columns(table_of(sections, "phases-terms"), "chunks", *seconds) == [
        (
            one.degree, one.transfer_seconds, one.compute_seconds, one.total_compute_seconds,
            one.exposed_communication_seconds, one.hidden_seconds, one.seconds,
        )
        for one in phases if one is not None
    ]  # fmt: skip
    strategies = table_of(sections, "strategies")
    names = ("strategy", "peak", "formulas", "host", "step", "Eq. 10")
    assert columns(strategies, *names) == [
        (
            one.strategy, one.peak_bytes, one.needed_bytes, one.host_bytes or None,
            one.step_seconds, one.paper_seconds,
        )
        for one in layer.strategies
    ]  # fmt: skip
    chosen = [row[0].value for row in strategies.rows if row[0].mark == "chosen"]
    assert chosen == [plan.memory.strategy]
    lost = [one for one in plan.alternatives if one.strategy == plan.memory.strategy]
    assert columns(table_of(sections, "alternatives"), "chunks", "strategy", "step") == [
        (f"{one.forward_degree} and {one.backward_degree}", one.strategy, one.step_seconds)
        for one in lost
    ]
    ranges = table_of(sections, "ranges")
    assert columns(ranges, "tokens per rank", "forward", "backward") == [
        (low, forward, backward) for low, _, forward, backward in plan.pipeline.ranges
    ]
    words = [words for section in sections for words in (*section.paragraphs, *section.notes)]
    assert plan.decision.why in words


def test_pins_are_shown_as_the_flags_that_set_them(layer: Explanation) -> None:
    pins = columns(table_of(explanation_sections(layer), "constraints"), "")
    assert [row[0] for row in pins] == ["--max-degree"]


def test_a_page_has_what_a_screen_has_and_figures_besides(layer: Explanation) -> None:
    screen = explanation_sections(layer)
    page = (*page_sections(layer), *reasons(layer, is_drawn=True))
    tables = {table.name: table for section in page for table in section.tables}
    for section in screen:
        for table in section.tables:
            assert tables[table.name] == table
    assert not all_figures(screen)
    names = [one.name for one in all_figures(page)]
    assert len(names) == len(set(names)) > 2
    sections = [one.name for one in page]
    assert len(sections) == len(set(sections))


def test_without_the_profile_the_note_says_why_terms_are_missing(layer: Explanation) -> None:
    without = replace(
        layer, forward=None, backward=None, strategies=(), profile=None, note="the profile is gone"
    )
    sections = explanation_sections(without)
    terms = next(one for one in sections if one.name == "terms")
    assert terms.notes == ("The profile is gone.",)
    assert not terms.tables
    kept = explanation_sections(replace(layer, profile=None, note="the profile is gone"))
    terms = next(one for one in kept if one.name == "terms")
    assert terms.notes == ("The profile is gone.",)
    assert terms.tables
    others = columns(table_of(sections, "alternatives"), "step")
    assert others == [(one.step_seconds,) for one in without.plan.alternatives]


def test_a_profile_shows_every_line_it_has() -> None:
    profile = lab_profile()
    found = FoundProfile(profile=profile, source="store")
    table = table_of(profile_sections(found), "operations")
    alphas = {row[1].value for row in table.rows}
    lines: tuple[GemmLine | CollectiveLine | CopyLine, ...] = (
        *profile.gemm, *profile.collective, *profile.copy,
    )  # fmt: skip
    for line in lines:
        assert line.alpha_seconds in alphas
        assert line.error is not None
        assert any(row[4].value == line.error.median for row in table.rows)
    rates = {row[2].value for row in table.rows}
    assert {1 / line.beta_seconds_per_byte for line in profile.collective} <= rates
    assert {1 / line.beta_seconds_per_mac for line in profile.gemm} <= rates
    page = table_of(profile_page(found, here="/x?operation="), "operations")
    assert {row[0].text for row in table.rows} <= {row[0].text for row in page.rows}
    (chosen,) = (row[0] for row in page.rows if row[0].mark == "chosen")
    assert chosen.text == "all_to_all, 8 ranks on 2 nodes"


def test_interference_is_shown_as_it_was_measured() -> None:
    profile = lab_profile()
    found = FoundProfile(profile=profile, source="store")
    table = table_of(profile_sections(found), "interference")
    speeds = profile.interference
    assert [tuple(cell.value for cell in row[1:]) for row in table.rows] == [
        (None, speeds.comp.comm, speeds.comp.mem, speeds.comp.all),
        (speeds.comm.comp, None, speeds.comm.mem, speeds.comm.all),
        (speeds.mem.comp, speeds.mem.comm, None, speeds.mem.all),
    ]


def test_plans_differ_in_the_fields_of_their_documents() -> None:
    first, second = lab_plan(), lab_plan(memory_limit_bytes=120 * 2**20)
    section = plan_differences(first, second, names=("one", "other"))
    rows = {row[0].value: row for row in section.tables[0].rows}
    limit = rows["inputs.memory_limit_bytes"]
    assert (limit[1].value, limit[2].value, limit[2].text) == (None, 120 * 2**20, "120 MiB")
    step = rows["predicted.step_seconds"]
    assert step[3].value == second.predicted.step_seconds / first.predicted.step_seconds
    assert "inputs.world_size" not in rows
    assert not plan_differences(first, first, names=("a", "b")).tables[0].rows


def test_profiles_differ_by_the_factor_that_one_is_slower() -> None:
    sections = machine_sections(
        lab_profile(), lab_profile("after", slower=1.3), names=("lab", "after")
    )
    rows = {row[0].value: row[3].value for row in sections[-1].tables[0].rows}
    betas = [ratio for key, ratio in rows.items() if str(key).endswith("beta_seconds_per_byte")]
    assert betas
    for ratio in betas:
        assert isinstance(ratio, float)
        assert math.isclose(ratio, 1.3, rel_tol=0.05)


def test_what_if_says_every_word_of_its_answer() -> None:
    plan: Plan = lab_plan()
    question = WhatIf(plan_id=plan.id, changes={"tokens_per_rank": 16384})
    answer = change_plan(plan, profile=lab_profile(), question=question)
    (words,) = whatif_sections(answer)
    said = (words.title, *words.paragraphs)
    assert set(answer.words) <= set(said)
    drawn = whatif_sections(answer, is_drawn=True)
    assert drawn[0] == words
    assert {"phases", "degrees", "timeline"} <= {one.name for one in all_figures(drawn)}


def test_every_named_model_is_listed_with_its_sizes() -> None:
    table = models_section().tables[0]
    names = "layer", "d_model", "d_hidden", "experts", "top_k", "tokens"
    assert columns(table, *names) == [
        (
            one.title, one.d_model, one.d_hidden,
            one.num_experts or f"{one.experts_per_rank} per rank", one.top_k, one.tokens_per_rank,
        )
        for one in MODELS.values()
    ]  # fmt: skip
    (layer,) = model_section(MODELS["tm-1"], world_size=64).tables
    assert {row[0].text: row[1].text for row in layer.rows}["num_experts"] == "64"
    (whole,) = registry_section(registered_models()).tables
    assert [row[0].text for row in whole.rows][:5] == [*WHOLE_MODELS]


def test_values_survive_json(layer: Explanation) -> None:
    for section in explanation_sections(layer):
        text = json.dumps(values_of(section), allow_nan=False)
        assert json.loads(text) == values_of(section)


def test_options_of_a_layer_are_its_plan_and_powers_of_two_of_each_strategy(
    layer: Explanation,
) -> None:
    plan, options = layer.plan, options_of(layer)
    pipeline = plan.pipeline
    first = options[0]
    assert [one.is_chosen for one in options] == [True] + [False] * (len(options) - 1)
    assert first.step_seconds == pytest.approx(plan.predicted.step_seconds)
    assert first.memory_bytes == plan.memory.peak_bytes
    ways = {
        (strategy, degree, degree)
        for strategy in ("none", "S1", "S2", "S3", "S4")
        for degree in (1, 2, 4, 8)  # it is planned with 8 chunks at most
        if degree > 1 or strategy == "none"
    } | {(plan.memory.strategy, pipeline.forward_degree, pipeline.backward_degree)}
    found = [re.findall(r"none|S\d|\d+", one.name) for one in options]
    assert {(name, int(first), int(second)) for name, first, second in found} == ways
    assert len(options) == len(ways)
    assert {one.group for one in options} == {way[0] for way in ways}
    assert options_of(replace(layer, profile=None)) == ()
    known = {one.strategy: one.step_seconds for one in layer.strategies}
    assert min(one.step_seconds for one in options) >= min(known.values()) * (1 - 1e-9)


def test_figures_are_drawn_of_what_a_plan_has(layer: Explanation) -> None:
    def names(figures: Iterable[Figure]) -> list[str]:
        return [one.name for one in figures]

    assert names(layer_figures(layer)) == ["timeline"]
    assert names(layer_figures(replace(layer, profile=None))) == ["phases"]
