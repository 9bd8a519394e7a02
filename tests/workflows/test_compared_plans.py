"""Two plans of any kind, and the list of them: the words and numbers agree with the plans."""

import pytest

from moetune.domain.constraint_texts import decode_constraints
from moetune.domain.plan import Plan
from moetune.domain.records import PlanInfo
from moetune.domain.request import PlanRequest
from moetune.report.section import Section
from moetune.workflows.library import StoredPlan
from moetune.workflows.plan import make_plan
from moetune.workflows.views.comparison import comparison_sections
from moetune.workflows.views.stored_plans import (
    stored_plans_table,
    tokens_per_second,
)
from tests.report.lab import lab_plan
from tests.solve.clusters import cluster_profile
from tests.training_plans import TRAINING, training_plan


def model_plan(**pinned: str) -> Plan:
    profile = cluster_profile()
    request = PlanRequest(
        model="ppmoe-6.7b",
        world_size=32,
        dtype="float16",
        constraints=decode_constraints(pinned),
    )
    return make_plan(request, profile=profile, fingerprint=profile.digest)


@pytest.fixture(scope="module")
def whole() -> tuple[Plan, Plan]:
    """The best layout of a model, and one that loses."""
    return model_plan(), model_plan(pp="8")


def compared(first: Plan, second: Plan) -> tuple[Section, Section, Section]:
    answer, figures, differences = comparison_sections(first, second, names=("one", "two"))
    return answer, figures, differences


def bars(figures: Section) -> dict[object, float]:
    """Return the length of each plan's bar, in seconds."""
    found: dict[object, float] = {}
    for plan, _, seconds in figures.figures[0].rows:
        assert isinstance(seconds, float)
        found[plan] = found.get(plan, 0.0) + seconds
    return found


def test_bars_of_two_models_are_as_long_as_their_steps(whole: tuple[Plan, Plan]) -> None:
    both = model_plan(**{"micro-batch": "2"}), whole[1]
    steps = [one.transformer.step_seconds for one in both if one.transformer]
    # The layout that wins has the slower layer, since it takes fewer micro-batches.
    assert steps[0] < steps[1]
    assert both[0].predicted.step_seconds > both[1].predicted.step_seconds
    found = bars(compared(*both)[1])
    assert [found["one"], found["two"]] == pytest.approx(steps)


def test_stages_are_counted_and_never_printed_as_objects(whole: tuple[Plan, Plan]) -> None:
    rows = {row[0].text: row for row in compared(*whole)[2].tables[0].rows}
    assert [cell.text for cell in rows["transformer.stages"][1:3]] == ["4 entries", "8 entries"]
    assert not [cell.text for row in rows.values() for cell in row if "{" in cell.text]


def test_lists_of_names_are_no_code() -> None:
    again = training_plan(
        id="fedcba98" * 8, layout=TRAINING["layout"] | {"recompute": ["norm", "moe"]}
    )
    found = comparison_sections(training_plan(), again, names=("one", "two"))
    rows = {row[0].text: row for row in found[2].tables[0].rows}
    assert [cell.text for cell in rows["layout.recompute"][1:3]] == ["none", "norm, moe"]


def test_differences_stand_in_words_first(whole: tuple[Plan, Plan]) -> None:
    words = " ".join(compared(*whole)[0].paragraphs)
    assert "one is the plan of a whole model" in words
    assert "two has --pp 8" in words
    assert "The layout is dp 4 · ep 2 · tp 1 · pp 8" in words
    layers = " ".join(compared(lab_plan(), lab_plan(8192))[0].paragraphs)
    assert "two has 8,192 tokens per rank instead of" in layers


def test_steps_of_a_layer_and_of_a_model_are_not_compared(whole: tuple[Plan, Plan]) -> None:
    answer, figures, _ = compared(whole[0], lab_plan())
    assert answer.paragraphs[-1].endswith("times are not compared.")
    assert "as long" not in " ".join(answer.paragraphs)
    assert [one.name for one in figures.figures] == ["degrees"]


def test_the_list_has_the_numbers_of_each_kind(whole: tuple[Plan, Plan]) -> None:
    plans = (whole[0], lab_plan())
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
    assert whole[0].transformer is not None
    assert model["step"].value == whole[0].transformer.step_seconds
    assert model["memory"].value == whole[0].transformer.memory.total_bytes
    assert (model["kind"].value, layer["kind"].value) == ("model", "layer")
    assert layer["step"].value == plans[1].predicted.step_seconds
    assert (unknown["step"].text, unknown["memory"].value) == ("cannot be read", None)


def test_tokens_a_second_are_those_of_all_ranks(whole: tuple[Plan, Plan]) -> None:
    for plan, seconds in (
        (whole[0], whole[0].transformer.step_seconds if whole[0].transformer else 0.0),
        (lab_plan(), lab_plan().predicted.step_seconds),
    ):
        tokens = plan.inputs.world_size * plan.inputs.tokens_per_rank
        assert tokens_per_second(plan) == pytest.approx(tokens / seconds)
