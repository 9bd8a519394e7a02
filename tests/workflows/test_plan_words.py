"""A plan in words: each figure is there where it applies, and only there."""

import re
from dataclasses import replace
from typing import Any

import pytest

from moetune.domain.constraint_texts import decode_constraints
from moetune.domain.constraints import Order, Strategy
from moetune.domain.plan import Choice, Plan
from moetune.domain.profile import Profile
from moetune.domain.request import PlanRequest
from moetune.workflows.explain import Explanation, explain_plan
from moetune.workflows.files import bundled_profiles, load_profile_file
from moetune.workflows.plan import make_plan
from moetune.workflows.views.decision import how_sure, plan_decision, probability_words
from moetune.workflows.views.explanation import reasons
from moetune.workflows.views.plan import answer_section, page_sections
from moetune.workflows.views.words import (
    device_word,
    memory_words,
    plan_name,
    plan_scope,
)
from tests.report.lab import LAYER, MACHINE, lab_plan, lab_profile
from tests.solve.clusters import cluster_profile

PERCENT = re.compile(r"[+-]?\d[\d.,]* %")


@pytest.fixture(scope="module")
def tensor() -> Explanation:
    profile = cluster_profile(num_devices=8)
    request = {"expert-parallel": "tensor"}
    return explained(request, profile)


@pytest.fixture(scope="module")
def sharded() -> Explanation:
    profile = cluster_profile(num_devices=8)
    request = {"expert-parallel": "tensor", "sequence-parallel": "true"}
    return explained(request, profile)


def explained(constraints: dict[str, str], profile: Profile) -> Explanation:
    request = PlanRequest(
        layer=LAYER, world_size=8, tokens_per_rank=8192, dtype="float16",
        constraints=decode_constraints(constraints),
    )  # fmt: skip
    return explain_plan(make_plan(request, profile=profile), profile=profile)


def layer(
    *, forward: int = 2, backward: int = 3, order: Order = "dispatch_first",
    strategy: Strategy = "none",
) -> Plan:  # fmt: skip
    plan = lab_plan()
    pipeline = replace(plan.pipeline, forward_degree=forward, backward_degree=backward, order=order)
    return replace(plan, pipeline=pipeline, memory=replace(plan.memory, strategy=strategy))


@pytest.mark.parametrize(
    ("plan", "degrees", "order"),
    [
        (layer(), ["2", "3"], False),
        (layer(order="interleaved"), ["2", "3"], True),
        (layer(order="interleaved", strategy="S1"), ["2", "3"], False),  # where it always is
        (layer(forward=1), ["1", "3"], False),
        (layer(backward=1), ["2", "1"], False),
        (layer(forward=1, backward=1, order="interleaved"), [], False),
    ],
)
def test_a_decision_names_its_chunks_and_an_order_that_was_chosen(
    plan: Plan,
    degrees: list[str],
    order: bool,  # noqa: FBT001 - a case
) -> None:
    text = plan_decision(plan)
    assert re.findall(r"\b\d+\b", text) == degrees
    assert ("interleaved" in text) is order
    strategy = plan.memory.strategy
    assert re.findall(r"strategy (\w+)", text) == [strategy]


@pytest.mark.parametrize(
    ("step_seconds", "regret", "figures"),
    [
        (1.25, 0.0, ["75 %", "+25.0 %"]),
        (1.25, 0.02, ["75 %", "2.0 %", "+25.0 %"]),
        (1.25, 5e-4, ["75 %", "0.1 %", "+25.0 %"]),
        (1.25, 4.9e-4, ["75 %", "+25.0 %"]),
        (0.99, 0.0, ["75 %", "-1.0 %"]),
        (None, 0.0, ["75 %"]),
    ],
)
def test_how_sure_a_choice_is_has_its_regret_and_the_next_ones_loss(
    step_seconds: float | None, regret: float, figures: list[str]
) -> None:
    plan = layer()
    second = None
    if step_seconds is not None:
        second = Choice(
            forward_degree=7, backward_degree=9, order="dispatch_first", strategy="none",
            step_seconds=step_seconds * plan.predicted.step_seconds,
        )  # fmt: skip
    verdict = replace(
        plan.decision, probability_best=0.75, expected_regret=regret, runner_up=second
    )
    text = how_sure(replace(plan, decision=verdict))
    assert PERCENT.findall(text) == figures
    assert ("7 and 9" in text) is (second is not None)
    assert "strategy" not in text
    if second is not None:
        other = replace(verdict, runner_up=replace(second, strategy="S2"))
        assert "strategy S2" in how_sure(replace(plan, decision=other))


def test_a_step_of_no_time_has_a_next_best_one_all_the_same() -> None:
    plan = lab_plan()
    idle = replace(plan, predicted=replace(plan.predicted, step_seconds=0.0))
    assert idle.decision.runner_up is not None
    assert PERCENT.findall(how_sure(idle))[-1] == "+0.0 %"


@pytest.mark.parametrize(
    ("share", "number"), [(0.0, "0"), (0.5, "50"), (0.994, "99"), (0.995, "99"), (1.0, "99")]
)
def test_a_probability_is_never_100_percent(share: float, number: str) -> None:
    assert re.findall(r"\d+", probability_words(share)) == [number]


def test_certainty_is_more_than_99_percent() -> None:
    assert len({probability_words(share) for share in (0.995, 1.0)}) == 1
    assert probability_words(0.995) != probability_words(0.994)


def test_memory_is_compared_with_the_plans_limit_else_the_devices() -> None:
    def sizes(explanation: Explanation) -> list[str]:
        return re.findall(r"[\d.]+ [KMG]iB", memory_words(explanation, 2**20, "parts"))

    plan, profile = lab_plan(), lab_profile()
    # What 92 % of a GPU leave free is said where nobody set the limit.
    assert sizes(explain_plan(plan, profile=profile)) == ["1.00 MiB", "942 MiB", "81.9 MiB"]
    inputs = replace(plan.inputs, constraints={"memory-taken": str(42 * 2**20)})
    taken = replace(plan, id=inputs.plan_id, inputs=inputs)
    assert sizes(explain_plan(taken, profile=profile))[1] == "900 MiB"
    cpu = replace(profile, machine=replace(profile.machine, kind="cpu"))
    assert sizes(explain_plan(plan, profile=cpu)) == ["1.00 MiB", "1.00 GiB"]
    limited = lab_plan(memory_limit_bytes=120 * 2**20)
    assert sizes(explain_plan(limited, profile=profile)) == ["1.00 MiB", "120 MiB"]
    assert sizes(explain_plan(plan, profile=None)) == ["1.00 MiB"]
    assert sizes(explain_plan(limited, profile=None)) == ["1.00 MiB", "120 MiB"]


def test_a_rank_is_a_gpu_where_the_machine_has_them() -> None:
    cpu = replace(lab_profile(), machine=replace(MACHINE, kind="cpu"))
    words = [device_word(one) for one in (None, cpu, lab_profile())]
    assert words == ["rank", "rank", "GPU"]
    plan = lab_plan()
    assert "8 GPUs" in plan_scope(plan, profile=lab_profile())
    assert "8 ranks" in plan_scope(plan)


def test_names_are_the_models_or_the_sizes() -> None:
    profile = load_profile_file(bundled_profiles()["rtx2080ti-x64"])
    named = make_plan(PlanRequest(model="gpt-s"), profile=profile)
    assert "512" not in plan_name(named)
    assert re.findall(r"\d+", plan_name(lab_plan())) == ["512", "2048"]
    assert plan_name(named).count("layer") == 1


def test_tensor_parallel_plans_name_their_collectives(
    tensor: Explanation, sharded: Explanation
) -> None:
    for explanation, reduces, gathers in (
        (tensor, "all-reduce", False), (sharded, "reduce-scatter", True),
    ):  # fmt: skip
        plan = explanation.plan
        one = replace(plan.pipeline, forward_degree=1, backward_degree=1)
        two = replace(plan.pipeline, forward_degree=2, backward_degree=1)
        for pipeline in (one, two):
            text = plan_decision(replace(plan, pipeline=pipeline))
            assert reduces in text
            assert ("all-gather" in text) is gathers
            degrees = [] if pipeline is one else ["2", "1"]
            assert re.findall(r"\d+", text) == degrees
        scope = plan_scope(plan)
        assert ("shard" in scope) is gathers
        terms = next(each for each in reasons(explanation) if each.name == "terms")
        (table,) = terms.tables
        assert reduces in table.notes[0]
        assert len(table.notes) == (3 if gathers else 2)
        answer = answer_section(explanation)
        assert len(answer.tables[0].rows) == 2 + bool(plan.predicted.overhead_seconds)


def test_the_reason_is_shown_once_and_only_where_nothing_overlaps() -> None:
    def paragraphs(plan: Plan, *, has_reasons: bool) -> int:
        explanation = explain_plan(plan, profile=lab_profile())
        answer = answer_section(explanation, has_reasons=has_reasons)
        assert page_sections(explanation)[0] == answer_section(explanation, has_reasons=True)
        return len(answer.paragraphs)

    for plan, is_shown in (
        (layer(), False), (layer(forward=1, backward=1), True), (layer(strategy="S1"), True),
        (layer(forward=1), False),
    ):  # fmt: skip
        without = paragraphs(plan, has_reasons=True)
        assert paragraphs(plan, has_reasons=False) == without + is_shown


@pytest.mark.parametrize(
    ("plan", "has_gain"),
    [(layer(), True), (layer(forward=1, backward=1), False), (layer(strategy="S1"), False)],
)
def test_the_summary_compares_with_one_chunk_where_chunks_overlap(
    plan: Plan,
    has_gain: bool,  # noqa: FBT001 - a case
) -> None:
    times = plan.predicted
    gain = times.sequential_step_seconds / times.step_seconds
    answer = answer_section(explain_plan(plan, profile=lab_profile()))
    assert (f"{gain:.2f} ×" in answer.summary) is has_gain


def test_highlights_have_the_regret_and_the_limit_where_there_is_one() -> None:
    plan = layer()
    notes = {}
    for regret in (0.0, 0.02):
        verdict = replace(plan.decision, expected_regret=regret)
        explanation = explain_plan(replace(plan, decision=verdict), profile=None)
        found = {one.name: one.note for one in answer_section(explanation).highlights}
        notes[regret] = found["How sure"]
        assert found["Memory of one device"] == ""
    assert PERCENT.findall(notes[0.0]) == []
    assert PERCENT.findall(notes[0.02]) == ["2.0 %"]
    idle = replace(plan, predicted=replace(plan.predicted, step_seconds=0.0))
    shown = answer_section(explain_plan(idle, profile=lab_profile())).highlights
    assert next(one for one in shown if one.name == "Against one chunk").cell.value is None


def test_remarks_on_transfers_count_what_is_hidden() -> None:
    def remark(forward: int, backward: int, **seconds: Any) -> list[str]:
        explanation = explain_plan(layer(forward=forward, backward=backward), profile=None)
        assert explanation.forward is not None
        assert explanation.backward is not None
        shown = replace(
            explanation,
            forward=replace(explanation.forward, **seconds),
            backward=replace(explanation.backward, **seconds),
        )
        terms = next(one for one in reasons(shown) if one.name == "terms")
        return re.findall(r"[\d.]+ m?s\b", terms.tables[0].notes[-1])

    whole_second = {"total_transfer_seconds": 1.0, "hidden_seconds": 0.25}
    assert remark(2, 2, **whole_second) == ["500 ms", "2.00 s"]
    assert remark(1, 2, **whole_second) == ["500 ms", "2.00 s"]
    assert remark(1, 1, **whole_second) == ["2.00 s"]
    assert remark(2, 2, total_transfer_seconds=0.0, hidden_seconds=0.0) == []


def test_strategies_that_were_not_measured_are_named() -> None:
    explanation = explain_plan(lab_plan(), profile=lab_profile())
    (table,) = next(one for one in reasons(explanation) if one.name == "strategies").tables
    some = [one for one in explanation.strategies if one.strategy in {"none", "S4"}]
    fewer = replace(explanation, strategies=tuple(some))
    (short,) = next(one for one in reasons(fewer) if one.name == "strategies").tables
    assert len(short.notes) == len(table.notes) + 1
    assert [name for name in ("none", "S1", "S2", "S3", "S4") if name in short.notes[0]] == [
        "S1", "S2", "S3",
    ]  # fmt: skip
    without = replace(explanation, strategies=())
    assert "strategies" not in [one.name for one in reasons(without)]
    others = next(one for one in reasons(without) if one.name == "lost").tables[0]
    assert len(others.rows) == len(without.plan.alternatives)


def test_what_was_pinned_is_among_the_reasons() -> None:
    def names(explanation: Explanation) -> list[str]:
        return [one.name for one in reasons(explanation)]

    of_layer = names(explain_plan(lab_plan(), profile=lab_profile()))
    assert of_layer[-4:] == ["terms", "strategies", "lost", "ranges"]
    assert "pins" in of_layer
    unpinned = replace(lab_plan().inputs, constraints={})
    free = replace(lab_plan(), inputs=unpinned, id=unpinned.plan_id)
    assert "pins" not in names(explain_plan(free, profile=lab_profile()))
