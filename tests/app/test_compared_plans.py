"""Two plans of any kind, and the list of them: the words and numbers agree with the plans."""

import pytest

from moetune.app.views.comparison import comparison_sections
from tests.report.lab import lab_plan
from tests.training_plans import training_plan


def test_steps_of_a_layer_and_of_a_model_are_not_compared() -> None:
    (answer,) = comparison_sections(training_plan(), lab_plan(), names=("first", "second"))
    assert answer.paragraphs[-1].endswith("times are not compared.")
    assert "as long" not in " ".join(answer.paragraphs)


def test_tokens_a_second_are_those_of_all_ranks() -> None:
    plan = lab_plan()
    tokens = plan.inputs.world_size * plan.inputs.tokens_per_rank
    assert plan.tokens_per_second == pytest.approx(tokens / plan.predicted.step_seconds)
