"""Timelines of a plan, predicted and recorded, as one Chrome trace (`moetune trace`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moetune.config import Launch
from moetune.domain.document import encode
from moetune.domain.errors import InputError
from moetune.domain.layer import Workload
from moetune.domain.plan import Decision, Plan, TransformerPlan
from moetune.domain.profile import Profile
from moetune.fit.costs import costs_of
from moetune.solve.layer.timeline import COMPUTE, LINK, Span
from moetune.solve.predict import (
    MICROSECONDS,
    overlap_share,
    plan_timelines,
    stage_events,
    trace_events,
)
from moetune.workflows.verify import workload_of

if TYPE_CHECKING:
    from moetune.runtime.trace import RecordedSpan

TRACE_SCHEMA = "moetune.trace/1"
TIMELINE_SCHEMA = "moetune.timeline/1"
_WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Share of the communication time in which computation runs (HTA's definition)."""

    forward: float
    backward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Events for Perfetto or chrome://tracing, and their overlap.

    Args:
        predicted, measured: None where these events are missing.
    """

    events: tuple[Mapping[str, object], ...]
    predicted: Overlap | None
    measured: Overlap | None

    @property
    def document(self) -> dict[str, object]:
        """The file of `moetune trace` and the service's answer; viewers ignore unknown keys."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecordedStep:
    workload: Workload
    decision: Decision


def predicted_trace(plan: Plan, *, profile: Profile | None) -> Trace:
    """Return the timelines that a plan predicts: a layer's passes, or a model's stages.

    Args:
        profile: the one that a layer's plan was made with; None gives no events.

    Raises:
        InputError: a whole model's plan has no stages.
    """
    if plan.transformer is not None:
        return _trace_stages(plan, plan.transformer)
    if profile is None:
        return Trace(events=(), predicted=None, measured=None)
    costs = costs_of(profile, allow_modelled=plan.inputs.pinned.allow_modelled)
    forward, backward = plan_timelines(plan=plan, costs=costs)
    overlap = Overlap(forward=overlap_share(forward.spans), backward=overlap_share(backward.spans))
    events = tuple(trace_events(forward=forward, backward=backward))
    return Trace(events=events, predicted=overlap, measured=None)


def recorded_trace(
    plan: Plan,
    *,
    profile: Profile | None,
    num_ranks: int | None,
    launch: Launch | None,
    environ: Mapping[str, str],
    oversubscribe: bool = False,
) -> Trace | None:
    """Return the predicted timelines and those of a recorded step; None on ranks above 0.

    Args:
        profile: the one that the plan was made with; None omits the prediction.
        num_ranks: to start where there is no launch.
        oversubscribe: several of them may share a core.

    Raises:
        InputError: the plan is for a whole model, or there are fewer cores than ranks.
        MoetuneError: a rank failed.
    """
    from moetune.workflows.launch import run_on_ranks

    step = _RecordedStep(
        workload=workload_of(plan), decision=plan.decide(plan.inputs.tokens_per_rank)
    )
    spans = run_on_ranks(
        _record, step, num_ranks=num_ranks or 1, launch=launch, environ=environ,
        oversubscribe=oversubscribe,
    )  # fmt: skip
    if launch is not None and launch.rank:
        return None
    predicted = predicted_trace(plan, profile=profile)
    events = (*predicted.events, *_measured_events(spans))
    return replace(predicted, events=events, measured=overlap_of(spans))


def _trace_stages(plan: Plan, transformer: TransformerPlan) -> Trace:
    """Return the passes of the micro-batches through the stages, whose times the plan holds."""
    if not transformer.stages:
        raise InputError(
            f"plan {plan.id[:6]} was made before plans stored their stages", "make the plan again"
        )
    return Trace(events=tuple(stage_events(transformer)), predicted=None, measured=None)


def overlap_of(spans: "Sequence[RecordedSpan]") -> Overlap:
    """Return the overlap of a recorded step."""

    def share(phase: str) -> float:
        return overlap_share(
            [
                Span(
                    name=span.name,
                    resource=span.resource,
                    stream=LINK if span.resource == "comm" else COMPUTE,
                    start_seconds=span.start_seconds,
                    end_seconds=span.end_seconds,
                )
                for span in spans
                if span.phase == phase
            ]
        )

    return Overlap(forward=share("forward"), backward=share("backward"))


def _measured_events(spans: "Sequence[RecordedSpan]") -> list[Mapping[str, object]]:
    zero = min((span.start_seconds for span in spans), default=0.0)
    return [
        {
            "name": f"{span.phase} {span.name} {span.chunk + 1}",
            "cat": span.resource,
            "ph": "X",
            "pid": "measured",
            "tid": LINK if span.resource == "comm" else COMPUTE,
            "ts": (span.start_seconds - zero) * MICROSECONDS,
            "dur": (span.end_seconds - span.start_seconds) * MICROSECONDS,
        }
        for span in spans
    ]


def _record(step: _RecordedStep, _: object) -> "tuple[RecordedSpan, ...]":
    """Record one warm step on this rank; all ranks of the launch call this together."""
    from moetune.workflows.launch import rank_device
    from moetune.workflows.steps import random_steps

    steps = random_steps(step.workload, device=rank_device())
    for _ in range(_WARM_UP_STEPS):
        steps.run(step.decision)
    return steps.record(step.decision)
