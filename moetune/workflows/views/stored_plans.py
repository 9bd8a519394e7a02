"""Stored plans of every kind as rows of one table: time, speed, memory, layout and trust."""

from collections.abc import Iterable
from dataclasses import dataclass

from moetune.domain.records import PlanInfo
from moetune.domain.training_document import AnyPlan, TrainingDocument
from moetune.report.section import EMPTY, Cell, Table
from moetune.solve.layout.words import name_layout
from moetune.workflows.views.words import kind_of
from moetune.workflows.whatif import needed_bytes, step_seconds

_HEADER = (
    "plan", "kind", "model", "step", "tokens/s", "memory", "layout", "chunks", "trust", "profile",
    "ranks", "tokens per rank", "age",
)  # fmt: skip
_NOTE = (
    "step: of the model, of a layer's plan of that layer. tokens/s: of all ranks together. memory: "
    "of the device that needs the most. chunks: forward and backward."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlan:
    """A stored plan's list entry, and the plan.

    Args:
        plan: None where its document cannot be read, since another program changed it.
    """

    info: PlanInfo
    plan: AnyPlan | None


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
    if plan.transformer is not None:
        return plan.transformer.tokens_per_second_per_rank * inputs.world_size
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
        return Cell.words("cannot be read", mark="suspect"), *[EMPTY] * 6
    speed = tokens_per_second(plan)
    fast = EMPTY if speed is None else Cell(text=f"{speed:,.0f}", value=speed)
    if isinstance(plan, TrainingDocument):
        best = plan.best
        step, memory, layout = best.predicted.step_seconds, best.memory.peak_bytes, best.words
        chunks, trust = _degree(best.layout.get("degree")), plan.trust
    else:
        step, memory = step_seconds(plan), needed_bytes(plan)
        layout, trust = name_layout(plan.layout), plan.predicted.trust
        degrees = plan.pipeline.forward_degree, plan.pipeline.backward_degree
        chunks = Cell.words(f"{degrees[0]} and {degrees[1]}")
    return (
        Cell.words(kind_of(plan)), Cell.seconds(step), fast, Cell.size(memory), Cell.words(layout),
        chunks, Cell.words(trust),
    )  # fmt: skip


def _degree(degree: object) -> Cell:
    if not isinstance(degree, dict):
        return EMPTY
    return Cell.words(f"{degree.get('forward')} and {degree.get('backward')}")
