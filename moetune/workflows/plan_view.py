"""A plan as readers see it, on a page or in a file: words, figures and tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moetune.domain.plan import Alternative, Plan
from moetune.report import tables
from moetune.report.picture import Picture
from moetune.report.tables import Cell, Table
from moetune.solve.words import HOW
from moetune.workflows.explain import Explanation, PhaseTerms
from moetune.workflows.pictures import choice_name, plan_pictures
from moetune.workflows.plan_words import (
    Highlight,
    plan_answer,
    plan_highlights,
    plan_name,
    plan_scope,
    sentence,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """A plan with everything that is shown of it.

    Args:
        remarks: warnings, and why terms are missing.
    """

    plan: Plan
    name: str
    scope: str
    answer: str
    highlights: tuple[Highlight, ...]
    why: str
    remarks: tuple[str, ...]
    pictures: tuple[Picture, ...]
    tables: tuple[Table, ...]


def view_plan(explanation: Explanation) -> PlanView:
    """Return a plan's view; with its profile the terms, the timeline and the strategies."""
    plan = explanation.plan
    remarks = [*plan.warnings, *([explanation.note] if explanation.note else [])]
    found = (
        _layouts(plan), _phases(explanation), _chunks(plan, explanation), _strategies(explanation),
        _constraints(plan),
    )  # fmt: skip
    return PlanView(
        plan=plan,
        name=plan_name(plan),
        scope=plan_scope(plan),
        answer=plan_answer(plan),
        highlights=plan_highlights(explanation),
        why=plan.decision.why,
        remarks=tuple(map(sentence, remarks)),
        pictures=plan_pictures(explanation),
        tables=tuple(table for table in found if table is not None),
    )


def _phases(explanation: Explanation) -> Table | None:
    forward, backward = explanation.forward, explanation.backward
    if forward is None or backward is None:
        return None
    rows = (("forward", forward), ("backward", backward))
    return Table(
        name="phases-terms",
        title="What the time consists of" + _of_layer(explanation.plan),
        header=(
            "phase", "chunks", "one transfer", "one chunk's experts", "all experts", "exposed",
            "hidden", "planned",
        ),
        rows=tuple((tables.text(name), *_terms(terms)) for name, terms in rows),
        right=tables.columns(1, 2, 3, 4, 5, 6, 7),
    )  # fmt: skip


def _terms(terms: PhaseTerms) -> Iterator[Cell]:
    yield tables.count(terms.degree)
    for number in (
        terms.transfer_seconds, terms.compute_seconds, terms.total_compute_seconds,
        terms.exposed_communication_seconds, terms.hidden_seconds, terms.seconds,
    ):  # fmt: skip
        yield tables.seconds(number)


def _layouts(plan: Plan) -> Table | None:
    whole = plan.transformer
    if whole is None:
        return None
    return _lost(
        "layouts", "Layouts that lost, and why",
        [one for one in plan.alternatives if one.layout], plan, whole.step_seconds,
    )  # fmt: skip


def _chunks(plan: Plan, explanation: Explanation) -> Table:
    """Return what lost among the chunks; other strategies have a table of their own."""
    listed = {one.strategy for one in explanation.strategies} - {plan.memory.strategy}
    others = [one for one in plan.alternatives if one.layout is None and one.strategy not in listed]
    return _lost(
        "alternatives", f"Chunks that lost{_of_layer(plan)}, and why", others, plan,
        plan.predicted.step_seconds,
    )  # fmt: skip


def _of_layer(plan: Plan) -> str:
    """Return what a title says where the plan is for more than the layer."""
    return "" if plan.transformer is None else " in one MoE layer"


def _lost(
    name: str, title: str, others: Sequence[Alternative], plan: Plan, step_seconds: float
) -> Table:
    """Return alternatives beside the chosen step."""
    memory = ("memory",) if any(one.memory_bytes for one in others) else ()
    return Table(
        name=name,
        title=title,
        header=("choice", "step", "slower by", *memory, "why it lost"),
        rows=tuple(
            (
                tables.text(choice_name(one, plan)),
                tables.seconds(one.step_seconds),
                _slower(one.step_seconds, step_seconds),
                *(tables.size(one.memory_bytes) for _ in memory),
                tables.text(sentence(one.lost_because)),
            )
            for one in others
        ),
        right=tables.columns(1, 2, *(3 for _ in memory)),
        empty="The bounds leave no other choice.",
    )


def _slower(seconds: float, best: float) -> Cell:
    return tables.share(seconds / best - 1, sign=True) if best else Cell(text="")


def _strategies(explanation: Explanation) -> Table | None:
    if not explanation.strategies:
        return None
    return Table(
        name="strategies",
        title="Ways to keep activations",
        header=("strategy", "how", "chunks", "step", "device", "peak", "host", "why it lost"),
        rows=tuple(
            (
                tables.text(one.strategy, mark="chosen" if one.is_chosen else ""),
                tables.text(sentence(HOW[one.strategy])),
                tables.text(f"{one.forward_degree} and {one.backward_degree}"),
                tables.seconds(one.step_seconds),
                tables.size(one.needed_bytes),
                tables.size(one.peak_bytes),
                tables.size(one.host_bytes or None),
                tables.text("The plan." if one.is_chosen else sentence(one.lost_because)),
            )
            for one in explanation.strategies
        ),
        right=tables.columns(3, 4, 5, 6),
    )


def _constraints(plan: Plan) -> Table | None:
    rows = sorted(plan.inputs.constraints.items())
    return tables.facts("Pinned or bounded", rows, name="constraints") if rows else None
