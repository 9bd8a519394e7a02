"""Times and timelines of a GPU: its own, not those of the host that launches the work."""

import pytest
import torch

from moetune.app.trace import overlap_of
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.plan import SAFE_DECISION, Decision
from moetune.measure.steps import LayerSteps, random_steps
from moetune.runtime.plans.timers import device_clock
from moetune.runtime.trace import TimelineRecorder
from tests.cuda_kit import FakeCuda, MirrorWorld
from tests.runtime.gpu_runs import GPU

EXCHANGE_SECONDS = 0.004
DECISIONS = (
    SAFE_DECISION,
    Decision(forward_degree=4, backward_degree=4),
    Decision(forward_degree=4, backward_degree=4, order="interleaved"),
    Decision(forward_degree=3, backward_degree=3, strategy="S1"),
)
Span = tuple[float, float]


def _steps(*, world_size: int = 2) -> LayerSteps:
    workload = Workload(
        layer=LayerShape(d_model=8, d_hidden=16, num_experts=4), world_size=world_size,
        tokens_per_rank=24,
    )  # fmt: skip
    return random_steps(workload, device=GPU)


def _exchanges(cuda: FakeCuda) -> set[Span]:
    """Return when each all-to-all really ran."""
    return {
        (round(call.start_seconds, 9), round(call.end_seconds, 9))
        for call in cuda.operations
        if call.label.startswith("all_to_all")
    }


@pytest.mark.parametrize("decision", DECISIONS)
def test_a_recorded_exchange_ran_and_lasts_as_long(decision: Decision) -> None:
    with FakeCuda() as cuda, MirrorWorld(cuda, seconds=EXCHANGE_SECONDS):
        steps = _steps()
        steps.run(decision)
        zero = cuda.current_stream(GPU).lane.seconds
        spans = steps.record(decision)
    assert all(span.end_seconds > span.start_seconds for span in spans)
    degrees = {"forward": decision.forward_degree, "backward": decision.backward_degree}
    for phase, degree in degrees.items():
        recorded = [span for span in spans if (span.phase, span.resource) == (phase, "comm")]
        shown = {
            (round(span.start_seconds + zero, 9), round(span.end_seconds + zero, 9))
            for span in recorded
        }
        assert len(shown) == len(recorded) == 2 * degree + 1  # dispatches, combines and weights
        assert shown <= _exchanges(cuda)


def test_what_the_recording_shows_is_the_overlap_of_the_streams() -> None:
    with FakeCuda() as cuda, MirrorWorld(cuda, seconds=EXCHANGE_SECONDS):
        steps = _steps()
        single, several = (overlap_of(steps.record(decision)) for decision in DECISIONS[:2])
    assert (single.forward, single.backward) == (0, 0)
    assert several.forward > 0.2
    assert several.backward > 0.2


def test_a_recording_waits_for_its_last_step_before_it_reads_the_times() -> None:
    with FakeCuda():
        weight = torch.ones(2, 2, device=GPU)
        recorder = TimelineRecorder(GPU)
        with recorder.compute("forward", "experts", 0):
            weight @ weight
        (span,) = recorder.spans()
    assert span.end_seconds - span.start_seconds == pytest.approx(1e-3)


def test_an_interval_is_read_without_waiting_for_a_device_that_has_no_part_in_it() -> None:
    with FakeCuda():
        weight = torch.ones(2, 2, device=GPU)
        begin = device_clock("forward", GPU)
        weight @ weight
        end = device_clock("forward", GPU)
        assert end.since(begin) == pytest.approx(1e-3)


def test_the_host_waits_for_its_gpu_before_it_looks_at_the_clock() -> None:
    with FakeCuda() as cuda, MirrorWorld(cuda):
        steps = _steps()
        steps.run(SAFE_DECISION)
        lane = cuda.current_stream(GPU).lane
        assert cuda.host.has_seen(lane, lane.count)
