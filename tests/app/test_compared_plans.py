"""Two plans of any kind, and the list of them: the words and numbers agree with the plans."""

import pytest

from moetune.app.views.comparison import comparison_sections
from moetune.domain.any_plan import AnyPlan
from moetune.report.section import Section
from tests.report.lab import lab_plan
from tests.training_plans import training_plan


def compared(first: AnyPlan, second: AnyPlan) -> tuple[Section, Section, Section]:
    answer, figures, differences = comparison_sections(
        first, second, names=("one", "two"), is_drawn=True
    )
    return answer, figures, differences


def test_steps_of_a_layer_and_of_a_model_are_not_compared() -> None:
    answer, figures, _ = compared(training_plan(), lab_plan())
    assert answer.paragraphs[-1].endswith("times are not compared.")
    assert "as long" not in " ".join(answer.paragraphs)
    assert figures.figures == ()


def test_tokens_a_second_are_those_of_all_ranks() -> None:
    plan = lab_plan()
    tokens = plan.inputs.world_size * plan.inputs.tokens_per_rank
    assert plan.tokens_per_second == pytest.approx(tokens / plan.predicted.step_seconds)
