"""Measured steps as sections: the verification of a plan, and the stored runs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moetune.app.verify import Verification, VerifiedStep
from moetune.domain.any_plan import AnyPlan
from moetune.domain.document import encode
from moetune.domain.layer import Throughput
from moetune.domain.plan import Plan
from moetune.domain.records import ObservedRun, Stored
from moetune.domain.targets import TargetName
from moetune.domain.units import format_chunks, format_seconds, format_share
from moetune.report.section import Cell, Section, Table
from moetune.report.words import speed_cell, speed_words

if TYPE_CHECKING:
    from moetune.store import SqlStore

MOST_SHOWN = 50
"""Most runs on a page; the newest are shown."""


def verification_sections(plan: Plan, verification: Verification) -> tuple[Section, ...]:
    """Return each decision's step, predicted and measured, and whether the numbers are equal."""
    planned, alone = verification.planned, verification.one_chunk
    deviation = max(step.deviation for step in verification.steps)
    equal = (
        f"Outputs and gradients equal those of one chunk within {deviation:.1e}. The busiest rank "
        f"had {verification.imbalance:.2f} × the mean rows, the plan assumes "
        f"{verification.planned_imbalance:.2f}."
    )
    kernels: dict[str, Callable[[VerifiedStep], str]] = {}
    if verification.kernel:
        equal += f" The experts of the plan ran by the kernel {verification.kernel}."
        kernels["kernel"] = lambda step: step.kernel
    table = Table.of(
        "steps",
        verification.steps,
        {
            "": lambda step: "plan" if step.is_planned else "",
            "strategy": lambda step: step.strategy,
            "chunks": lambda step: Cell.count(step.forward_degree),
            **kernels,
            "predicted": lambda step: Cell.seconds(step.predicted_seconds),
            "measured": lambda step: Cell.seconds(step.step_seconds),
            "error": lambda step: Cell.share(step.error, sign=True),
            "FLOP/s": lambda step: speed_cell(_speed(plan, step.step_seconds)),
        },
        wide=("FLOP/s",),  # the sentence above has the plan's
        notes=(equal,),
    )
    speed = _speed(plan, planned.step_seconds)
    of_speed = f" ({speed_words(speed)})" if speed else ""
    words = (
        f"Plan {plan.id[:6]} takes {format_seconds(planned.step_seconds)} a step here{of_speed}, "
        f"{alone.step_seconds / planned.step_seconds:.2f} × as fast as one chunk. "
        f"{_prediction_words(planned)} {_fastest_words(verification)}"
    )
    return (Section(name="verification", paragraphs=(words,), tables=(table,)),)


WIDE = 2.0
"""A range whose end is this many times its beginning would contain nearly every step."""


def verdict(plan: Plan, verification: Verification) -> str:
    """Return a sentence that says whether the plan holds here, or its gravest fault."""
    name, took = f"plan {plan.id[:6]}", format_seconds(verification.planned.step_seconds)
    if not verification.is_equal:
        return f"chunks changed the numbers of {name} by more than {verification.tolerance:g}"
    low, high = verification.range_seconds or (0.0, 0.0)
    span = f"{format_seconds(low)} to {format_seconds(high)}"
    if verification.has_lost:
        gap = verification.planned.step_seconds / verification.one_chunk.step_seconds - 1
        return f"{name} lost to one chunk, which is {format_share(gap)} faster than its {took}"
    if not verification.is_inside:
        return f"{name} missed its range of {span}: a step takes {took}"
    inside = f"its step of {took} is inside its range of {span}"
    if verification.range_seconds is None:
        inside = f"its step takes {took}, and it promised no range"
    holds = f"{name[0].upper()}{name[1:]} holds here: {inside}, and one chunk is no faster."
    if high <= WIDE * low:
        return holds
    return (
        f"{holds} But a range whose end is {high / low:.2g} times its beginning promises little: "
        "measure again on an idle machine, and plan with that."
    )


def observed_sections(store: "SqlStore", plan: AnyPlan) -> tuple[Section, ...]:
    """Return the runs of a training plan's machine and runtime; empty for a layer's plan."""
    if plan.kind != "training":
        return ()
    return observed_runs(store, plan.inputs.profile_fingerprint, target=plan.inputs.target)


def observed_runs(
    store: "SqlStore", fingerprint: str, *, target: TargetName | None = None
) -> tuple[Section, ...]:
    """Return the newest runs that were predicted with a profile; empty without runs."""
    runs = store.observed_runs(profile_fingerprint=fingerprint, target=target, limit=MOST_SHOWN)
    words = "Plans that are made now for the same machine, runtime and version follow these runs."
    section = replace(runs_section(runs), title="Observed runs", paragraphs=(words,))
    return (section,) if runs else ()


def runs_section(runs: Sequence[Stored[ObservedRun]]) -> Section:
    """Return the table of observed runs, measured against predicted."""
    table = Table.of(
        "runs",
        runs,
        {
            "id": lambda row: Cell.words(f"r{row.id}"),
            "time, UTC": lambda row: Cell.words(row.created_at[:16].replace("T", " ")),
            "model": lambda row: row.value.model,
            "GPUs": lambda row: Cell.count(row.value.world_size),
            "profile": lambda row: row.value.profile,
            "runtime": lambda row: row.value.runtime,
            "source": lambda row: row.value.source,
            "predicted": lambda row: Cell.seconds(row.value.predicted_seconds),
            "observed": lambda row: Cell.seconds(row.value.seconds),
            "ratio": lambda row: Cell(text=f"{row.value.ratio:.2f}", value=row.value.ratio),
        },
        wide=("predicted", "source", "time, UTC", "profile"),
        empty="Nothing was observed yet.",
    )  # fmt: skip
    return Section(name="runs", title="Runs of whole models", tables=(table,))


def stored_documents(rows: Iterable[Stored[ObservedRun]]) -> list[dict[str, Any]]:
    """Return stored runs as JSON values."""
    return [{"id": row.id, "created_at": row.created_at, **encode(row.value)} for row in rows]


def _speed(plan: Plan, seconds: float) -> Throughput | None:
    predicted = plan.throughput
    return predicted and predicted.over(seconds, plan.predicted.step_seconds)


def _prediction_words(planned: VerifiedStep) -> str:
    if planned.predicted_seconds is None or planned.error is None:
        return "Its profile was not found, so nothing was predicted for other degrees."
    error = format_share(planned.error, sign=True)
    return f"Predicted: {format_seconds(planned.predicted_seconds)} ({error})."


def _fastest_words(verification: Verification) -> str:
    fastest, planned = verification.fastest, verification.planned
    if fastest is planned:
        return "No other degree was faster."
    gap = planned.step_seconds / fastest.step_seconds - 1
    return (
        f"The fastest was in {format_chunks(fastest.forward_degree, fastest.backward_degree)}, "
        f"by {format_share(gap)}."
    )
