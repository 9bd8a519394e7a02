"""Predicted and measured timelines of a plan as one Chrome trace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetune.config import Launch
from moetune.domain.errors import InputError
from moetune.domain.layer import Workload
from moetune.domain.plan import Decision, Plan, TransformerPlan
from moetune.domain.profile import Profile
from moetune.fit.costs import costs_of
from moetune.solve.layer.timeline import COMPUTE, LINK, Span
from moetune.solve.predict import plan_timelines
from moetune.solve.trace import MICROSECONDS, overlap_share, stage_events, trace_events
from moetune.workflows.plan import ALLOW_MODELLED
from moetune.workflows.verify import workload_of

if TYPE_CHECKING:
    from moetune.runtime.moe.trace import RecordedSpan

_WARM_UP_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Share of the communication time in which computation runs (HTA's definition)."""

    forward: float
    backward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Events for Perfetto or chrome://tracing, and what they say.

    Args:
        predicted, measured: None where that side is missing.
    """

    events: tuple[Mapping[str, object], ...]
    predicted: Overlap | None
    measured: Overlap | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    workload: Workload
    decision: Decision


def trace_plan(
    plan: Plan,
    *,
    profile: Profile | None,
    num_ranks: int | None,
    launch: Launch | None,
    environ: Mapping[str, str],
) -> Trace | None:
    """Return the plan's timelines, None on ranks above 0.

    Args:
        profile: what the plan was made from; None leaves the prediction out.
        num_ranks: to start for a measured step; None with no launch leaves that out.

    Raises:
        InputError: a whole model is to be run, or its plan has no stages.
        MoetuneError: a rank failed.
    """
    if plan.transformer is not None and num_ranks is None and launch is None:
        return _trace_stages(plan, plan.transformer)
    workload = workload_of(plan)
    events: list[Mapping[str, object]] = []
    predicted = measured = None
    if profile is not None:
        allowed = ALLOW_MODELLED in plan.inputs.constraints
        forward, backward = plan_timelines(
            plan=plan, costs=costs_of(profile, allow_modelled=allowed)
        )
        events += trace_events(forward=forward, backward=backward)
        predicted = Overlap(
            forward=overlap_share(forward.spans), backward=overlap_share(backward.spans)
        )
    if num_ranks is not None or launch is not None:
        from moetune.workflows.launch import run_on_ranks

        order = _Order(workload=workload, decision=plan.decide(plan.inputs.tokens_per_rank))
        spans = run_on_ranks(
            _record, order, num_ranks=num_ranks or 1, launch=launch, environ=environ
        )
        if launch is not None and launch.rank:
            return None
        events += _measured_events(spans)
        measured = overlap_of(spans)
    return Trace(events=tuple(events), predicted=predicted, measured=measured)


def _trace_stages(plan: Plan, whole: TransformerPlan) -> Trace:
    """Return the micro-batches' ways through the stages, which the plan itself says."""
    if not whole.stages:
        raise InputError(
            f"plan {plan.id[:6]} was made before plans kept their stages", "make the plan again"
        )
    return Trace(events=tuple(stage_events(whole)), predicted=None, measured=None)


def overlap_of(spans: "Sequence[RecordedSpan]") -> Overlap:
    """Return the overlapped shares of a recorded step."""

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


def _record(order: _Order, _: object) -> "tuple[RecordedSpan, ...]":
    """Record one warm step on this rank; all ranks of the launch call this together."""
    from moetune.workflows.launch import rank_device
    from moetune.workflows.steps import random_steps

    steps = random_steps(order.workload, device=rank_device())
    for _ in range(_WARM_UP_STEPS):
        steps.run(order.decision)
    return steps.record(order.decision)
