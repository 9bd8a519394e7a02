"""A real step's timeline: what overlaps, and that it is recorded as it happened."""

from typing import Any

import pytest
import torch

from moetune.app.subjects import LayerSubject
from moetune.app.trace import overlap_of, recorded_trace
from moetune.domain.layer import PHASES, LayerShape, Workload
from moetune.domain.plan import SAFE_DECISION
from moetune.measure.steps import random_steps
from moetune.runtime.trace import RecordedSpan
from tests.runtime.plans import small_plan
from tests.runtime.slow_link import SlowLink

WIRE_SECONDS = 0.01


def _record(degree: int) -> tuple[RecordedSpan, ...]:
    workload = Workload(
        layer=LayerShape(d_model=128, d_hidden=512, num_experts=2),
        world_size=1,
        tokens_per_rank=1024,
    )
    steps = random_steps(workload, device=torch.device("cpu"), communicator=SlowLink(WIRE_SECONDS))
    decision = SAFE_DECISION.with_degree(degree)
    steps.run(decision)
    return steps.record(decision)


def test_one_chunk_overlaps_nothing() -> None:
    overlap = overlap_of(_record(1))
    assert overlap.forward == pytest.approx(0, abs=1e-3)
    assert overlap.backward == pytest.approx(0, abs=1e-3)


def test_chunks_compute_while_others_travel_forward_and_backward() -> None:
    overlap = overlap_of(_record(4))
    assert overlap.forward > 0.01
    assert overlap.backward > 0.01


def test_each_chunk_is_dispatched_computed_and_combined_in_that_order() -> None:
    spans = {(span.phase, span.name, span.chunk): span for span in _record(4)}
    assert len(spans) == 3 * (4 + 4) + 2  # combine weights, and their gradients
    for phase in PHASES:
        for chunk in range(4):
            dispatch = spans[phase, "dispatch", chunk]
            experts = spans[phase, "experts", chunk]
            combine = spans[phase, "combine", chunk]
            assert dispatch.end_seconds <= experts.start_seconds + 1e-3
            assert experts.end_seconds <= combine.start_seconds + 1e-3
            assert combine.end_seconds >= experts.end_seconds + 0.5 * WIRE_SECONDS
    sent = [spans["forward", "dispatch", chunk].num_bytes or 0 for chunk in range(4)]
    assert sum(sent) == 1024 * 128 * 4  # one rank sends every row


def test_a_recorded_step_is_a_trace_from_zero_with_every_span_in_microseconds() -> None:
    plan = small_plan(layer=LayerShape(d_model=16, d_hidden=32, num_experts=4), world_size=1)
    trace = recorded_trace(
        LayerSubject(plan=plan), num_ranks=None, launch=None, environ={}, oversubscribe=False
    )
    assert trace is not None
    degrees = plan.pipeline.forward_degree, plan.pipeline.backward_degree
    shown: list[Any] = list(trace.events)
    events = [event for event in shown if event["ph"] == "X"]
    assert len(events) == sum(degrees)  # one rank exchanges nothing
    assert min(event["ts"] for event in events) == 0
    ends = [event["ts"] + event["dur"] for event in events]
    assert 10 < max(ends) < 60e6  # a step of more than 10 µs and less than a minute
    names = {event["name"] for event in events}
    assert {f"forward experts {chunk + 1}" for chunk in range(degrees[0])} <= names
    assert {f"backward experts {chunk + 1}" for chunk in range(degrees[1])} <= names
    assert all((event["pid"], event["tid"]) == (1, 1) for event in events)
    tracks = [event["args"]["name"] for event in shown if event["name"] == "thread_name"]
    assert tracks == ["compute"]
    assert trace.predicted is None
    assert trace.measured is not None
    assert trace.document["traceEvents"] == list(trace.events)
    assert trace.summary("x.json")["measured"] == trace.document["measured"]
