"""Stored plans of every kind as rows of one table: time, speed, memory, layout and trust."""

from collections.abc import Iterable
from dataclasses import dataclass

from moetune.domain.plan import Plan
from moetune.domain.training import Degrees
from moetune.domain.training_document import AnyPlan, TrainingDocument
from moetune.report.section import EMPTY, Cell, Table
from moetune.workflows.library import StoredPlan
from moetune.workflows.plan_changes import needed_bytes, step_seconds
from moetune.workflows.views.words import (
    kind_of,
    mfu_cell,
    plan_speed,
    speed_cell,
    trust_words,
)

_HEADER = (
    "plan", "kind", "model", "step", "tokens/s", "memory", "layout", "trust", "FLOP/s", "MFU",
    "chunks", "profile", "ranks", "tokens per rank", "age",
)  # fmt: skip
_NOTE = (
    "step: of the model, of a layer's plan of that layer. tokens/s: of all ranks together. memory: "
    "of the device that needs the most. FLOP/s: model FLOPs of one device, MFU: their share of "
    "its data sheet's peak. chunks: forward and backward."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Addresses of a row's plan and profile, and the plan's age.

    Args:
        age: in words.
        age_seconds: to sort by.
    """

    plan: str
    profile: str
    age: str
    age_seconds: float


def stored_plans_table(found: Iterable[tuple[StoredPlan, Links]], *, empty: str) -> Table:
    """Return the table of plans.

    Args:
        empty: text without plans.
    """
    return Table(
        name="plans",
        title="Newest first",
        header=_HEADER,
        rows=tuple(_row(one, links) for one, links in found),
        notes=(_NOTE,),
        empty=empty,
    )


def tokens_per_second(plan: AnyPlan) -> float | None:
    """Return the tokens a second of all ranks together; None for a step that takes no time.

    Tensor-parallel ranks compute the same tokens, which count once.
    """
    if isinstance(plan, TrainingDocument):
        return plan.best.predicted.tokens_per_second_per_device * plan.inputs.world_size
    inputs, layout, seconds = plan.inputs, plan.layout, step_seconds(plan)
    sets = layout.dp if kind_of(plan) == "tensor" else inputs.world_size
    return sets * inputs.tokens_per_rank / seconds if seconds else None


def _row(one: StoredPlan, links: Links) -> tuple[Cell, ...]:
    info = one.info
    kind, *facts = _facts(one.plan)
    return (
        Cell(text=info.id[:12], value=info.id, href=links.plan, mark="code"),
        kind,
        Cell.words(info.model or "a layer"),
        *facts,
        Cell.words(info.profile, href=links.profile),
        Cell.count(info.world_size),
        Cell.count(info.tokens_per_rank),
        Cell(text=links.age, value=links.age_seconds, unit="s"),
    )


def _facts(plan: AnyPlan | None) -> tuple[Cell, ...]:
    if plan is None:
        return Cell.words("cannot be read", mark="suspect"), *[EMPTY] * 8
    tokens, speed = tokens_per_second(plan), plan_speed(plan)
    if isinstance(plan, TrainingDocument):
        layout, chunks = plan.best.words, _degree(plan.layout.degree)
    else:
        layout = _layout(plan)
        degrees = plan.pipeline.forward_degree, plan.pipeline.backward_degree
        chunks = Cell.words(f"{degrees[0]} and {degrees[1]}")
    return (
        Cell.words(kind_of(plan)),
        Cell.seconds(step_seconds(plan)),
        EMPTY if tokens is None else Cell(text=f"{tokens:,.0f}", value=tokens),
        Cell.size(needed_bytes(plan)),
        Cell.words(layout),
        Cell.words(trust_words(plan), mark="suspect" if plan.is_suspect else ""),
        speed_cell(speed),
        mfu_cell(speed),
        chunks,
    )


def layout_of(plan: AnyPlan) -> str:
    """Return a plan's layout; of a layer its chunks, forward and backward."""
    if isinstance(plan, TrainingDocument):
        return plan.best.words
    pipeline = plan.pipeline
    return f"{pipeline.forward_degree} and {pipeline.backward_degree} chunks"


def _layout(plan: Plan) -> str:
    """Return the sizes above 1, and how experts are shared where it is not by exchanges."""
    layout = plan.layout
    sizes = {"dp": layout.dp, "ep": layout.ep, "tp": layout.tp, "pp": layout.pp}
    named = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    tensor = ["tensor"] if layout.expert_parallel == "tensor" else []
    return " · ".join([*named, *tensor]) or "one rank"


def _degree(degree: Degrees | None) -> Cell:
    return EMPTY if degree is None else Cell.words(f"{degree.forward} and {degree.backward}")
