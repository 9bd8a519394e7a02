"""The timeline of a whole model's stages."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.constraints import Constraints, LayoutPins
from moetune.domain.model_plan import StageTime
from moetune.domain.request import PlanRequest
from moetune.solve.layer.timeline import Span, Timeline
from moetune.solve.model.stages import one_f_one_b, stage_timeline
from moetune.workflows.plan import make_plan
from tests.solve.clusters import GB, cluster_profile
from tests.solve.stage_events import event_by_event, program_of

seconds = st.floats(0.1, 3.0)
stage_lists = st.lists(st.tuples(seconds, seconds, st.floats(0.0, 0.5)), min_size=1, max_size=6)


def stages_of(numbers: list[tuple[float, float, float]]) -> list[StageTime]:
    return [
        StageTime(
            num_blocks=1, forward_seconds=forward, backward_seconds=backward,
            send_seconds=0.0 if index == len(numbers) - 1 else send,
        )
        for index, (forward, backward, send) in enumerate(numbers)
    ]  # fmt: skip


def spans_by_stage(found: Timeline) -> dict[str, list[Span]]:
    ordered = sorted(found.spans, key=lambda span: (span.stream, span.start_seconds))
    return {
        stream: list(spans)
        for stream, spans in itertools.groupby(ordered, key=lambda span: span.stream)
    }


@given(stage_lists, st.integers(1, 9))
def test_stages_run_every_pass_in_torchs_order_and_none_before_what_it_needs(
    numbers: list[tuple[float, float, float]], num_micro_batches: int
) -> None:
    found = stage_timeline(stages_of(numbers), num_micro_batches=num_micro_batches)
    by_stage = spans_by_stage(found)
    ends = {(span.stream, span.name): span for span in found.spans if span.resource == "comp"}
    for index in range(len(numbers)):
        spans = by_stage[f"stage {index + 1}"]
        assert all(
            one.end_seconds <= two.start_seconds + 1e-9 for one, two in itertools.pairwise(spans)
        )
        wanted = [
            act.kind for act in program_of(index, len(numbers), num_micro_batches)
            if act.kind in {"F", "B"}
        ]  # fmt: skip
        passes = [span for span in spans if span.resource == "comp"]
        assert [span.name[0].upper() for span in passes] == wanted
        for span in passes:
            other = index if span.name.startswith("forward") else index + 2
            before = ends.get((f"stage {other}", span.name))
            assert before is None or before.end_seconds <= span.start_seconds + 1e-9
    assert found.makespan_seconds == max(span.end_seconds for span in found.spans)


@given(seconds, seconds, st.integers(1, 6), st.integers(1, 9))
def test_equal_stages_with_free_sends_end_when_torchs_schedule_does(
    forward: float, backward: float, num_stages: int, num_micro_batches: int
) -> None:
    stages = stages_of([(forward, backward, 0.0)] * num_stages)
    found = stage_timeline(stages, num_micro_batches=num_micro_batches)
    wanted = event_by_event(
        [forward] * num_stages, [backward] * num_stages, [0.0] * num_stages, num_micro_batches
    )
    assert found.makespan_seconds == pytest.approx(wanted)


@given(stage_lists, st.integers(1, 9))
def test_unequal_stages_with_sends_take_about_what_torchs_schedule_does(
    numbers: list[tuple[float, float, float]], num_micro_batches: int
) -> None:
    stages = stages_of(numbers)
    found = stage_timeline(stages, num_micro_batches=num_micro_batches).makespan_seconds
    wanted = event_by_event(
        [one.forward_seconds for one in stages], [one.backward_seconds for one in stages],
        [one.send_seconds for one in stages], num_micro_batches,
    )  # fmt: skip
    assert 0.8 * wanted <= found <= 1.25 * wanted


def test_a_plan_keeps_the_stages_that_its_step_is_made_of() -> None:
    profile = cluster_profile(num_devices=16, between=2 * GB)
    request = PlanRequest(model="ppmoe-6.7b", constraints=Constraints(pins=LayoutPins(pp=4)))
    plan = make_plan(request, profile=profile)
    whole = plan.transformer
    assert whole is not None
    assert len(whole.stages) == 4
    assert sum(stage.num_blocks for stage in whole.stages) == whole.num_layers
    pipeline = one_f_one_b(
        stage_seconds=[one.forward_seconds + one.backward_seconds for one in whole.stages],
        hop_seconds=[one.send_seconds for one in whole.stages[:-1]],
        num_micro_batches=whole.num_micro_batches,
    )
    after = sum(one.seconds for one in whole.parts if one.name in {"gradients", "optimizer"})
    assert pipeline.seconds + after == pytest.approx(whole.step_seconds)
    forward = sum(stage.forward_seconds for stage in whole.stages) * whole.num_micro_batches
    assert 0 < forward < whole.step_seconds * len(whole.stages)
