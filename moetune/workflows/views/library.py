"""Lists of stored plans and observations as sections."""

from collections.abc import Sequence

from moetune.domain.records import Observation, Stored
from moetune.domain.storable import is_sound
from moetune.domain.training_document import TrainingDocument
from moetune.report.observed import seen
from moetune.report.section import EMPTY, Cell, Section, Table
from moetune.workflows.library import StoredPlan
from moetune.workflows.plan_changes import step_seconds
from moetune.workflows.views.stored_plans import layout_of
from moetune.workflows.views.words import (
    mfu_cell,
    plan_speed,
    tflops_cell,
    trust_words,
)


def plans_section(found: Sequence[StoredPlan], *, num_more: int = 0) -> Section:
    """Return the table of plans.

    Args:
        num_more: plans that are not in `found`.
    """
    table = Table(
        name="plans",
        header=(
            "plan", "model", "ranks", "layout", "for", "step", "made, UTC", "profile", "TFLOP/s",
            "MFU", "trust", "tokens per rank",
        ),
        rows=tuple(map(_plan, found)),
        wide=("profile", "TFLOP/s", "MFU", "trust", "tokens per rank"),
        empty="No plan matches; `moetune plan` makes one.",
        num_more=num_more,
    )  # fmt: skip
    return Section(name="plans", tables=(table,))


def _plan(one: StoredPlan) -> tuple[Cell, ...]:
    info, plan = one.info, one.plan
    speed = plan_speed(plan) if plan else None
    suspect = " (suspect)" if plan and plan.is_suspect else ""
    return (
        Cell(text=info.id[:8], value=info.id, mark="code"),
        Cell(text=f"{info.model or 'a layer'}{suspect}", value=info.model or "a layer"),
        Cell.count(info.world_size),
        EMPTY if plan is None else _layout(layout_of(plan)),
        Cell.words(plan.inputs.target if isinstance(plan, TrainingDocument) else ""),
        Cell.words("cannot be read") if plan is None else Cell.seconds(step_seconds(plan)),
        Cell(text=_minute(info.created_at)[5:], value=_minute(info.created_at)),
        Cell(text=f"{info.profile}{suspect}", value=info.profile),
        tflops_cell(speed),
        mfu_cell(speed),
        EMPTY if plan is None else Cell.words(trust_words(plan)),
        Cell.count(info.tokens_per_rank),
    )


def _layout(words: str) -> Cell:
    """Return a layout as short as it can be told: "dp16 pp2 mb2"."""
    short = words.replace("micro-batch", "mb")
    if " · " in words:
        short = " ".join(size.replace(" ", "") for size in short.split(" · "))
    return Cell(text=short, value=words)


def observations_section(found: Sequence[Stored[Observation]]) -> Section:
    """Return the table of observations.

    One with times that no step takes has no error of its prediction.
    """
    errors = {one.id: one.error for one in seen(found)}
    rows = tuple(
        (
            Cell.count(one.id),
            Cell.words(_minute(one.created_at)),
            Cell(text=one.value.plan_id[:12], value=one.value.plan_id, mark="code"),
            Cell.words(one.value.source),
            Cell.count(one.value.tokens_per_rank),
            Cell.count(len(one.value.seconds)),
            Cell.share(errors[one.id], sign=True)
            if is_sound(one.value)
            else Cell.words("no step takes its time", mark="suspect"),
        )
        for one in found
    )
    table = Table(
        name="observations",
        header=("id", "time, UTC", "plan", "source", "tokens per rank", "steps", "error"),
        rows=rows,
        empty="Nothing was observed yet.",
    )
    return Section(name="observations", tables=(table,))


def _minute(created_at: str) -> str:
    return created_at[:16].replace("T", " ")
