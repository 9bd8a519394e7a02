"""A plan in words: each figure is there where it applies, and only there."""

import re
from dataclasses import replace
from typing import Any

import pytest

from moetune.domain.constraint_texts import decode_constraints
from moetune.domain.constraints import Order, Strategy
from moetune.domain.layout import Layout
from moetune.domain.model_plan import Chunks, ModelBinding, Part, TransformerPlan
from moetune.domain.plan import Choice, Plan
from moetune.domain.profile import Profile
from moetune.domain.request import PlanRequest
from moetune.workflows.explain import Explanation, explain_plan
from moetune.workflows.files import bundled_profiles, load_profile_file
from moetune.workflows.plan import make_plan
from moetune.workflows.views.decision import how_sure, plan_decision, probability_words
from moetune.workflows.views.explanation import explanation_sections, reasons
from moetune.workflows.views.plan import answer_section, page_sections, plan_sections
from moetune.workflows.views.words import (
    device_word,
    memory_words,
    plan_name,
    plan_scope,
)
from tests.report.lab import LAYER, MACHINE, lab_plan, lab_profile
from tests.solve.clusters import GB, cluster_profile

PERCENT = re.compile(r"[+-]?\d[\d.,]* %")


@pytest.fixture(scope="module")
def model() -> Explanation:
    profile = cluster_profile(num_devices=32, between=2 * GB)
    plan = make_plan(PlanRequest(model="ppmoe-6.7b", world_size=32), profile=profile)
    return explain_plan(plan, profile=profile)


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


def whole(plan: Plan) -> TransformerPlan:
    assert plan.transformer is not None
    return plan.transformer


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


@pytest.mark.parametrize(
    ("moe_every", "part"),
    [(1, "all with"), (2, "every 2nd with"), (3, "every 3rd with"), (4, "every 4th with")],
)
def test_a_models_scope_counts_its_layers_with_experts(
    model: Explanation, moe_every: int, part: str
) -> None:
    plan = model.plan
    scope = plan_scope(replace(plan, transformer=replace(whole(plan), moe_every=moe_every)))
    assert part in scope
    assert f"{plan.inputs.layer.num_experts} experts" in scope
    dense = plan_scope(replace(plan, transformer=replace(whole(plan), moe_every=0)))
    assert "expert" not in dense
    assert f"{whole(plan).num_layers} layers" in dense


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


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        ({"dp": 4, "tp": 1, "pp": 1, "ep": 1}, {"dp"}),
        ({"dp": 4, "tp": 2, "pp": 1, "ep": 1}, {"dp", "tp"}),
        ({"dp": 4, "tp": 1, "pp": 2, "ep": 4}, {"dp", "pp", "ep"}),
        ({"dp": 1, "tp": 2, "pp": 2, "ep": 1, "expert_parallel": "tensor"}, {"dp", "tp", "pp"}),
    ],
)
def test_a_models_decision_names_the_cuts_that_it_makes(
    model: Explanation, layout: dict[str, Any], named: set[str]
) -> None:
    kept = Layout(**{"expert_parallel": "all_to_all", **layout})
    text = plan_decision(replace(model.plan, layout=kept))
    assert set(re.findall(r"\((\wp)\)", text)) == named
    assert ("shared by the same ranks" in text) == (kept.expert_parallel == "tensor")


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
def test_a_models_decision_names_what_its_runtime_has_to_do(
    model: Explanation,
    zero: bool,  # noqa: FBT001 - a case
    recompute: bool,  # noqa: FBT001 - a case
    chunked: bool,  # noqa: FBT001 - a case
) -> None:
    chunks = Chunks(chunk_bytes=2**20, cache_bytes=2**22, scatter=True, offload=False)
    plan = replace(
        model.plan,
        chunks=chunks if chunked else None,
        transformer=replace(whole(model.plan), zero=zero, recompute=recompute),
    )
    text = plan_decision(plan)
    assert ("ZeRO" in text) is (zero and not chunked)
    assert ("recompute" in text) is recompute
    dense = replace(plan, transformer=replace(whole(plan), moe_every=0))
    assert "experts" not in plan_decision(dense)
    answer = plan_sections(replace(model, plan=plan))[0]
    lacking = plan_sections(replace(model, plan=dense))[0]
    # The decision, its chunks, its MoE layers, its memory.
    assert len(answer.paragraphs) == 3 + chunked
    assert len(lacking.paragraphs) == 2 + chunked


@pytest.mark.parametrize(
    ("scatter", "offload", "sizes"),
    [
        (True, False, ["1.00 MiB", "4.00 MiB"]),
        (True, True, ["1.00 MiB", "4.00 MiB"]),
        (False, False, ["1.00 MiB"]),
    ],
)
def test_chunks_name_their_cache_where_they_are_gathered_and_the_host_where_they_live_there(
    model: Explanation,
    scatter: bool,  # noqa: FBT001 - a case
    offload: bool,  # noqa: FBT001 - a case
    sizes: list[str],
) -> None:
    chunks = Chunks(chunk_bytes=2**20, cache_bytes=2**22, scatter=scatter, offload=offload)
    answer = plan_sections(replace(model, plan=replace(model.plan, chunks=chunks)))[0]
    text = answer.paragraphs[1]
    assert re.findall(r"[\d.]+ MiB", text) == sizes
    assert ("offload" in text) is offload
    assert ("4 chunks" in text) is scatter


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


def test_a_models_summary_has_the_share_of_what_binds(model: Explanation) -> None:
    part = whole(model.plan).parts[0]
    parts = (replace(part, name="gate", seconds=1.0), replace(part, name="gradients", seconds=3.0))
    known = replace(whole(model.plan), parts=parts, step_seconds=4.0)

    def shares(binding: ModelBinding) -> list[str]:
        plan = replace(model.plan, transformer=replace(known, binding=binding))
        return re.findall(r"(\d+) %", plan_sections(replace(model, plan=plan))[0].summary)

    assert shares("gradients") == ["75"]
    assert shares("computation") == ["25"]
    assert shares("memory") == []


def test_a_part_that_has_no_forward_pass_shows_none(model: Explanation) -> None:
    parts = (
        Part(name="gate", layer_seconds=0.25, forward_seconds=1.0, seconds=3.0, share=0.6),
        Part(name="norms", layer_seconds=0.5, forward_seconds=3.0, seconds=1.5, share=0.3),
        Part(name="optimizer", layer_seconds=0.0, forward_seconds=0.0, seconds=0.5, share=0.1),
    )
    known = replace(whole(model.plan), parts=parts, step_seconds=5.0)
    sections = plan_sections(replace(model, plan=replace(model.plan, transformer=known)))
    (table,) = next(one.tables for one in sections if one.name == "parts")
    assert [tuple(cell.value for cell in row) for row in table.rows] == [
        ("gate", 0.25, 1.0, 0.25, 3.0, 0.6),
        ("norms", 0.5, 3.0, 0.75, 1.5, 0.3),
        ("optimizer", None, None, None, 0.5, 0.1),
        ("all", None, 4.0, 1.0, 5.0, 1.0),
    ]


def test_sections_of_one_layer_are_left_out_of_a_dense_models_reasons(model: Explanation) -> None:
    def names(explanation: Explanation) -> list[str]:
        return [one.name for one in reasons(explanation)]

    layered = ["terms", "lost", "ranges"]
    assert names(model)[-4:] == ["layer", *layered]
    dense = replace(model.plan, transformer=replace(whole(model.plan), moe_every=0))
    assert not set(names(replace(model, plan=dense))) & {"layer", *layered}
    of_layer = names(explain_plan(lab_plan(), profile=lab_profile()))
    assert of_layer[-4:] == ["terms", "strategies", "lost", "ranges"]
    assert "pins" in of_layer
    unpinned = replace(lab_plan().inputs, constraints={})
    free = replace(lab_plan(), inputs=unpinned, id=unpinned.plan_id)
    assert "pins" not in names(explain_plan(free, profile=lab_profile()))


def test_how_sure_a_choice_of_chunks_is_belongs_to_layers_with_experts(model: Explanation) -> None:
    trust = explanation_sections(model)[-1]
    assert trust.paragraphs
    dense = replace(model.plan, transformer=replace(whole(model.plan), moe_every=0))
    without_experts = explanation_sections(replace(model, plan=dense))[-1]
    assert set(without_experts.paragraphs) < set(trust.paragraphs)
    assert plan_sections(explain_plan(lab_plan(), profile=lab_profile()))[-1].paragraphs


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


def test_strategies_that_were_not_measured_are_named(model: Explanation) -> None:
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
    lost = [one for one in without.plan.alternatives if one.layout is None]
    assert len(others.rows) == len(lost)
    assert model.strategies == ()
