"""Timelines of a plan, predicted and recorded, as a single Chrome trace (`moetune trace`).

Perfetto and chrome://tracing show the events. The prediction and each rank are processes of the
trace, and their streams are threads. Both have names, and numbers that viewers sort by.

Source: "Trace Event Format", complete events ("X") and metadata ("M").
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from moetune.app.sensitivity import check_same
from moetune.app.subjects import Subject
from moetune.config import Launch
from moetune.domain.document import encode
from moetune.domain.errors import InputError
from moetune.domain.layer import Workload
from moetune.domain.plan import Decision
from moetune.solve.layer.timeline import COMPUTE, LINK, Span
from moetune.solve.trace import TraceSpan, chunk_span, overlap_share

if TYPE_CHECKING:
    from moetune.runtime.trace import RecordedSpan

TRACE_SCHEMA = "moetune.trace/1"
TIMELINE_SCHEMA = "moetune.timeline/2"
_WARM_UP_STEPS = 3
_PREDICTED = 0
"""Number of the prediction's process; rank r has number r + 1."""
_MICROSECONDS = 1e6
_FIRST_TRACKS = (COMPUTE, LINK)
_Step: TypeAlias = tuple[Workload, Decision]
_Event: TypeAlias = dict[str, object]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Share of communication time during which computation runs (HTA's definition)."""

    forward: float
    backward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Events for Perfetto or chrome://tracing, and their overlap.

    Args:
        predicted, measured: None without such events; measured is of the first rank.
        notes: remarks that a reader of the events has to know.
    """

    events: tuple[Mapping[str, object], ...]
    predicted: Overlap | None
    measured: Overlap | None
    notes: tuple[str, ...] = ()

    @property
    def document(self) -> dict[str, object]:
        """The contents of a trace file and of the service's answer; viewers ignore unknown keys."""
        return {
            "schema": TIMELINE_SCHEMA,
            "traceEvents": list(self.events),
            "displayTimeUnit": "ms",
            **self._overlaps,
        }

    def summary(self, file: str) -> dict[str, object]:
        """Return the document of `moetune trace --json` for the written file."""
        return {"schema": TRACE_SCHEMA, "file": file, **self._overlaps}

    @property
    def _overlaps(self) -> dict[str, object]:
        return {"predicted": encode(self.predicted), "measured": encode(self.measured)}


def predicted_trace(subject: Subject) -> Trace:
    """Return the timelines that a plan predicts.

    Raises:
        InputError: this version of moetune predicts another step, or the plan's model has changed.
        ProfileError: the plan's profile is missing or has changed.
    """
    check_same(subject)
    timelines = subject.timelines()
    events = [
        event
        for number, (name, spans) in enumerate(timelines.processes, start=_PREDICTED)
        for event in process_events(name, spans, number=number)
    ]
    overlap = None if timelines.overlap is None else Overlap(*timelines.overlap)
    return Trace(events=tuple(events), predicted=overlap, measured=None, notes=timelines.notes)


def recorded_trace(
    subject: Subject, *, num_ranks: int | None, launch: Launch | None, environ: Mapping[str, str],
    oversubscribe: bool,
) -> Trace | None:  # fmt: skip
    """Return the predicted timelines and those of a recorded step; None on ranks above 0.

    The ranks' clocks start at a barrier before the step.

    Args:
        num_ranks: number of ranks to start without a launch.
        oversubscribe: whether ranks may share a core.

    Raises:
        InputError: there are fewer cores than ranks, or the plan is of a whole model.
        MoetuneError: a rank failed.
    """
    from moetune.app.launch import run_on_ranks

    plan = subject.plan
    if plan.kind == "training":
        raise InputError(
            f"plan {plan.id[:6]} is a training plan, whose steps only its target runs",
            "omit --nproc: the trace has what the plan predicts",
        )
    step = plan.workload, plan.decide(plan.inputs.tokens_per_rank)
    by_rank = run_on_ranks(
        _record, step, num_ranks=num_ranks or 1, launch=launch, environ=environ,
        oversubscribe=oversubscribe,
    )  # fmt: skip
    if launch is not None and launch.rank:
        return None
    predicted = Trace(events=(), predicted=None, measured=None)
    if subject.profile is not None:
        predicted = predicted_trace(subject)
    events = (*predicted.events, *_measured_events(step, by_rank))
    return replace(predicted, events=events, measured=overlap_of(by_rank[0]))


def overlap_of(spans: "Sequence[RecordedSpan]") -> Overlap:
    """Return the overlap of a recorded step."""

    def share(phase: str) -> float:
        return overlap_share([_span(span) for span in spans if span.phase == phase])

    return Overlap(forward=share("forward"), backward=share("backward"))


def _span(span: "RecordedSpan", zero_seconds: float = 0.0) -> Span:
    stream = LINK if span.resource == "comm" else COMPUTE
    start, end = span.start_seconds - zero_seconds, span.end_seconds - zero_seconds
    return Span(span.name, span.resource, stream, start, end)


def _measured_events(
    step: _Step, by_rank: "Sequence[Sequence[RecordedSpan]]"
) -> list[Mapping[str, object]]:
    zero = min((span.start_seconds for spans in by_rank for span in spans), default=0.0)
    workload, decision = step
    events: list[Mapping[str, object]] = []
    for rank, spans in enumerate(by_rank):
        drawn = [
            chunk_span(
                _span(span, zero), phase=span.phase, chunk=span.chunk,
                tokens=workload.tokens_per_rank, degree=decision.degree,
                num_bytes=span.num_bytes,
            )
            for span in spans
        ]  # fmt: skip
        events += process_events(f"measured, rank {rank}", drawn, number=_PREDICTED + 1 + rank)
    return events


def _record(step: _Step, _: object) -> "list[tuple[RecordedSpan, ...]]":
    """Record a warm step and return all ranks' spans; all ranks call this together."""
    from moetune.app.launch import rank_device
    from moetune.measure.steps import random_steps

    workload, decision = step
    steps = random_steps(workload, device=rank_device())
    for _ in range(_WARM_UP_STEPS):
        steps.run(decision)
    communicator = steps.layer.communicator
    communicator.barrier("the recorded step's begin")
    spans = steps.record(decision)
    return communicator.all_gather_object(spans, "the ranks' recorded steps")


def process_events(name: str, spans: Sequence[TraceSpan], *, number: int) -> list[_Event]:
    """Return a process's names, tracks and spans in microseconds, computation and link first."""
    seen = dict.fromkeys(span.track for span in spans)
    tracks = [track for track in _FIRST_TRACKS if track in seen]
    tracks += [track for track in seen if track not in _FIRST_TRACKS]
    threads = {track: index for index, track in enumerate(tracks, start=1)}
    named = [*_named("process", name, number, {"pid": number})] if spans else []
    for track, thread in threads.items():
        named += _named("thread", track, thread, {"pid": number, "tid": thread})
    return [*named, *(_event(span, number, threads[span.track]) for span in spans)]


def _named(kind: str, name: str, place: int, where: Mapping[str, int]) -> Iterator[_Event]:
    yield {"ph": "M", "name": f"{kind}_name", **where, "args": {"name": name}}
    yield {"ph": "M", "name": f"{kind}_sort_index", **where, "args": {"sort_index": place}}


def _event(span: TraceSpan, process: int, thread: int) -> _Event:
    return {
        "name": span.name, "cat": span.resource, "ph": "X", "pid": process, "tid": thread,
        "ts": span.start_seconds * _MICROSECONDS,
        "dur": (span.end_seconds - span.start_seconds) * _MICROSECONDS, "args": dict(span.args),
    }  # fmt: skip
