"""Two plans of any kind, and the list of them: the words and numbers agree with the plans."""

import pytest

from moetune.domain.records import PlanInfo
from moetune.domain.training_document import AnyPlan
from moetune.report.section import Section
from moetune.workflows.library import StoredPlan
from moetune.workflows.views.comparison import comparison_sections
from moetune.workflows.views.stored_plans import (
    stored_plans_table,
    tokens_per_second,
)
from tests.report.lab import lab_plan
from tests.training_plans import TRAINING, training_plan


def compared(first: AnyPlan, second: AnyPlan) -> tuple[Section, Section, Section]:
    answer, figures, differences = comparison_sections(first, second, names=("one", "two"))
    return answer, figures, differences


def test_lists_of_names_are_no_code() -> None:
    again = training_plan(
        id="fedcba98" * 8, layout=TRAINING["layout"] | {"recompute": ["norm", "moe"]}
    )
    found = comparison_sections(training_plan(), again, names=("one", "two"))
    rows = {row[0].text: row for row in found[2].tables[0].rows}
    assert [cell.text for cell in rows["layout.recompute"][1:3]] == ["none", "norm, moe"]


def test_differences_stand_in_words_first() -> None:
    layers = " ".join(compared(lab_plan(), lab_plan(8192))[0].paragraphs)
    assert "two has 8,192 tokens per rank instead of" in layers


def test_steps_of_a_layer_and_of_a_model_are_not_compared() -> None:
    answer, figures, _ = compared(training_plan(), lab_plan())
    assert answer.paragraphs[-1].endswith("times are not compared.")
    assert "as long" not in " ".join(answer.paragraphs)
    assert figures.figures == ()


def test_the_list_has_the_numbers_of_each_kind() -> None:
    whole = training_plan()
    plans: tuple[AnyPlan, ...] = (whole, lab_plan())
    infos = [
        PlanInfo(
            id=one.id, model=one.inputs.model, profile="y", world_size=one.inputs.world_size,
            tokens_per_rank=one.inputs.tokens_per_rank, created_at="2026-11-24T00:00:00+00:00",
        )
        for one in plans
    ]  # fmt: skip
    stored = [StoredPlan(info=info, plan=one) for info, one in zip(infos, plans, strict=True)]
    stored.append(StoredPlan(info=infos[0], plan=None))
    table = stored_plans_table(stored, empty="")
    model, layer, unknown = (dict(zip(table.header, row, strict=True)) for row in table.rows)
    assert model["step"].value == whole.predicted.step_seconds
    assert model["memory"].value == whole.memory.peak_bytes
    assert (model["kind"].value, layer["kind"].value) == ("training", "layer")
    assert layer["step"].value == lab_plan().predicted.step_seconds
    assert (unknown["step"].text, unknown["memory"].value) == ("cannot be read", None)


def test_tokens_a_second_are_those_of_all_ranks() -> None:
    plan = lab_plan()
    tokens = plan.inputs.world_size * plan.inputs.tokens_per_rank
    assert tokens_per_second(plan) == pytest.approx(tokens / plan.predicted.step_seconds)
