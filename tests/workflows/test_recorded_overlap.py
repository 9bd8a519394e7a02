"""A real step's timeline: what overlaps, and that it is recorded as it happened."""

import pytest
import torch

from moetune.domain.layer import LayerShape, Workload
from moetune.domain.plan import Decision
from moetune.runtime.trace import RecordedSpan
from moetune.workflows.steps import random_steps
from moetune.workflows.trace import overlap_of
from tests.runtime.slow_link import SlowLink

WIRE_SECONDS = 0.01


def _record(forward_degree: int, backward_degree: int) -> tuple[RecordedSpan, ...]:
    workload = Workload(
        layer=LayerShape(d_model=128, d_hidden=512, num_experts=2),
        world_size=1,
        tokens_per_rank=1024,
    )
    steps = random_steps(workload, device=torch.device("cpu"), communicator=SlowLink(WIRE_SECONDS))
    decision = Decision(forward_degree=forward_degree, backward_degree=backward_degree)
    steps.run(decision)
    return steps.record(decision)


def test_one_chunk_overlaps_nothing() -> None:
    overlap = overlap_of(_record(1, 1))
    assert overlap.forward == pytest.approx(0, abs=1e-3)
    assert overlap.backward == pytest.approx(0, abs=1e-3)


def test_chunks_compute_while_others_travel_forward_and_backward() -> None:
    overlap = overlap_of(_record(4, 3))
    assert overlap.forward > 0.01
    assert overlap.backward > 0.01


def test_each_chunk_is_dispatched_computed_and_combined_in_that_order() -> None:
    spans = {(span.phase, span.name, span.chunk): span for span in _record(4, 3)}
    assert len(spans) == 3 * (4 + 3)
    for phase, degree in (("forward", 4), ("backward", 3)):
        for chunk in range(degree):
            dispatch = spans[phase, "dispatch", chunk]  # type: ignore[index]  # a phase's name
            experts = spans[phase, "experts", chunk]  # type: ignore[index]  # as above
            combine = spans[phase, "combine", chunk]  # type: ignore[index]  # as above
            assert dispatch.end_seconds <= experts.start_seconds + 1e-3
            assert experts.end_seconds <= combine.start_seconds + 1e-3
            assert combine.end_seconds >= experts.end_seconds + 0.5 * WIRE_SECONDS
