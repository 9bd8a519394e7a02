"""What is read from a recorded backward pass, whatever the recording threads had to wait for."""

from dataclasses import replace

from moetune.runtime.parallel.dense_gradients import GRADIENT_MARK, PHASE_MARK
from moetune.runtime.parallel.gradient_plan import _stages
from moetune.runtime.trace import RecordedSpan
from moetune.solve.model.program import Compute, Send


def span(name: str, start: float, end: float, chunk: int = 0) -> RecordedSpan:
    resource = "comm" if name in {"dispatch", "combine"} else "comp"
    return RecordedSpan(
        phase="backward", name=name, resource=resource, chunk=chunk,  # type: ignore[arg-type]  # of two strings
        start_seconds=start, end_seconds=end, num_bytes=8,
    )  # fmt: skip


SPANS = (
    span("dispatch", 0, 1), span("dispatch", 1, 2, 1), span("experts", 1, 3),
    span("combine", 3, 4), span("experts", 3, 5, 1), span("combine", 5, 6, 1),
    span(PHASE_MARK, 6, 6), span(GRADIENT_MARK, 8, 8, 7), span("dispatch", 9, 10),
    span("experts", 10, 11), span("combine", 11, 12), span(PHASE_MARK, 12, 12),
    span(GRADIENT_MARK, 14, 14, 3),
)  # fmt: skip


def events_of(spans: list[RecordedSpan]) -> list[str]:
    ordered = sorted(spans, key=lambda one: one.start_seconds)
    stages = _stages(ordered, lambda number: number * 2**20)
    events = [event for number, one in enumerate(stages) for event in one.program(number)]
    return [
        str(event._replace(seconds=0.0) if isinstance(event, Compute | Send) else event)
        for event in events
    ]


def test_a_combine_that_is_recorded_late_is_one_of_its_own_phase() -> None:
    wanted = events_of([*SPANS])
    for start in (6.5, 8.5):  # behind the phase's end, and behind a gradient
        late = [
            replace(one, start_seconds=start, end_seconds=start)
            if (one.name, one.start_seconds) == ("combine", 5)
            else one
            for one in SPANS
        ]
        assert events_of(late) == wanted
