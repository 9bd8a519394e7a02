"""Predicted timelines last as long as their plans say, in Perfetto's format."""

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from moetune.app.trace import process_events
from moetune.domain.constraints import Bounds, Order, Strategy
from moetune.domain.costs import LinearCost
from moetune.domain.interference import CommSpeed, CompSpeed, Interference
from moetune.domain.plan import Plan
from moetune.domain.samples import ResourceClass
from moetune.domain.units import dtype_bytes
from moetune.solve.layer.timeline import Span
from moetune.solve.trace import TraceSpan, layer_spans, overlap_share, plan_timelines
from tests.solve.costs_by_hand import LinearCosts, solution

COSTS = LinearCosts(interference=Interference(comm=CommSpeed(comp=0.8), comp=CompSpeed(comm=0.9)))
WITH_COPIES = replace(
    COSTS, copy_mode="pinned", copy_cost=LinearCost(alpha_seconds=1e-5, beta_seconds=1e-10)
)


def _plan(degree: int | None = None, order: Order | None = None) -> Plan:
    bounds = Bounds(forward_degree=degree, order=order)
    return solution(costs=COSTS, bounds=bounds)


def _span(resource: ResourceClass, start: float, end: float) -> Span:
    return Span("some", resource, resource, start, end)


@pytest.mark.parametrize("order", ["dispatch_first", "interleaved"])
@pytest.mark.parametrize("degree", [None, 1, 5])
def test_timelines_last_as_long_as_the_plan_predicts(degree: int | None, order: str) -> None:
    plan = _plan(degree, "interleaved" if order == "interleaved" else "dispatch_first")
    forward, backward = plan_timelines(plan=plan, costs=COSTS)
    assert forward.makespan_seconds == pytest.approx(plan.predicted.forward_seconds, rel=1e-9)
    assert backward.makespan_seconds == pytest.approx(plan.predicted.backward_seconds, rel=1e-9)


@pytest.mark.parametrize("strategy", ["S1", "S2", "S3", "S4"])
@pytest.mark.parametrize("degree", [1, 2, 6])
def test_timelines_of_reused_memory_last_as_long_as_predicted(
    strategy: Strategy, degree: int
) -> None:
    bounds = Bounds(forward_degree=degree, strategy=strategy)
    plan = solution(costs=WITH_COPIES, bounds=bounds)
    forward, backward = plan_timelines(plan=plan, costs=WITH_COPIES)
    assert forward.makespan_seconds == pytest.approx(plan.predicted.forward_seconds, rel=1e-9)
    assert backward.makespan_seconds == pytest.approx(plan.predicted.backward_seconds, rel=1e-9)
    copies = {span.stream for span in forward.spans if span.resource == "mem"}
    assert copies == ({"copies"} if strategy != "S4" and degree > 1 else set())


def _events(plan: Plan) -> list[Any]:
    forward, backward = plan_timelines(plan=plan, costs=COSTS)
    spans = layer_spans(plan=plan, costs=COSTS, forward=forward, backward=backward)
    events: list[Any] = json.loads(json.dumps(process_events("predicted", spans, number=0)))
    return events


def test_a_layers_trace_has_complete_events_in_microseconds() -> None:
    plan = _plan(3)
    events = [event for event in _events(plan) if event["ph"] == "X"]
    assert Counter((event["cat"], event["pid"], event["tid"]) for event in events) == {
        ("comm", 0, 2): 12,
        ("comp", 0, 1): 6,
    }
    ends = [event["ts"] + event["dur"] for event in events]
    total = plan.predicted.forward_seconds + plan.predicted.backward_seconds
    assert max(ends) == pytest.approx(total * 1e6)
    first_backward = min(e["ts"] for e in events if e["name"].startswith("backward"))
    assert first_backward == pytest.approx(plan.predicted.forward_seconds * 1e6)
    assert events[0]["name"] == "forward dispatch 1"


def test_chunks_have_their_tokens_and_transfers_their_bytes() -> None:
    plan = _plan(3)
    rows, width, element_bytes = plan.workload.rows, plan.workload.layer.d_model, 2
    for event in _events(plan):
        if event["ph"] == "X":
            chunk, args = int(event["name"][-1]), event["args"]
            assert (args["chunk"], args["chunks"]) == (chunk, 3)
            assert args["tokens"] in {4096 // 3, 4096 // 3 + 1}
            sent = round(rows / 3 * width * element_bytes * 29 / 30)  # pairs on one rank: 1 of 15
            assert args.get("bytes") == (sent if event["cat"] == "comm" else None)
    experts = [e for e in _events(plan) if "forward experts" in e["name"]]
    assert sum(event["args"]["tokens"] for event in experts) == 4096


def test_copies_to_the_host_and_back_have_their_bytes() -> None:
    bounds = Bounds(forward_degree=2, strategy="S1")
    plan = solution(costs=WITH_COPIES, bounds=bounds)
    forward, backward = plan_timelines(plan=plan, costs=WITH_COPIES)
    spans = layer_spans(plan=plan, costs=WITH_COPIES, forward=forward, backward=backward)
    workload = plan.workload
    row_bytes = workload.rows / 2 * dtype_bytes(workload.dtype)
    widths = {"input": workload.layer.d_model, "middle": workload.layer.d_hidden}
    copies = [span for span in spans if span.resource == "mem"]
    assert len(copies) == 8
    for span in copies:
        what = span.name.split()[-2]
        assert span.args["bytes"] == round(row_bytes * widths[what])


def test_processes_and_tracks_have_names_and_an_order() -> None:
    tracks = ("link", "copies", "compute", "link")
    spans = [TraceSpan("a", "comm", track, 0.0, 1.0, {}) for track in tracks]
    events: list[Any] = process_events("rank 3", spans, number=4)
    named = {(e["name"], e.get("tid")): e["args"] for e in events if e["ph"] == "M"}
    assert named == {
        ("process_name", None): {"name": "rank 3"},
        ("process_sort_index", None): {"sort_index": 4},
        ("thread_name", 1): {"name": "compute"},
        ("thread_sort_index", 1): {"sort_index": 1},
        ("thread_name", 2): {"name": "link"},
        ("thread_sort_index", 2): {"sort_index": 2},
        ("thread_name", 3): {"name": "copies"},
        ("thread_sort_index", 3): {"sort_index": 3},
    }
    assert [event["tid"] for event in events if event["ph"] == "X"] == [2, 3, 1, 2]
    assert {event["pid"] for event in events} == {4}
    assert process_events("rank 3", [], number=4) == []


def test_overlap_share_is_the_part_of_communication_during_computation() -> None:
    spans = [
        _span("comm", 0.0, 2.0),
        _span("comm", 3.0, 5.0),
        _span("comp", 1.0, 3.5),
        _span("comp", 3.25, 4.0),  # beside the one before: counted once
        _span("mem", 0.0, 9.0),
    ]
    assert overlap_share(spans) == pytest.approx((1.0 + 1.0) / 4.0)
