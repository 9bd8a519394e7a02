"""Sections that compare two plans or choices: in words, by decisions and by parts of a step."""

from collections.abc import Iterator

from moetune.app.subjects import subject_of
from moetune.domain.any_plan import AnyPlan
from moetune.domain.units import format_seconds
from moetune.report.comparison import WhatIfAnswer, changed_inputs, compare
from moetune.report.model_words import binding_words
from moetune.report.section import Cell, Section, Table, sentence
from moetune.report.why_not import ComparedChoice, difference_of
from moetune.report.words import plan_scope, suspect_words


def comparison_sections(
    first: AnyPlan, second: AnyPlan, *, names: tuple[str, str]
) -> tuple[Section, ...]:
    """Return how the second plan differs: in words, and in tables if both are of a kind."""
    doubts = (words for plan in (first, second) for words in suspect_words(plan))
    words = Section(
        name="answer",
        doubts=tuple(dict.fromkeys(doubts)),
        paragraphs=tuple(_words(first, second, names)),
    )
    if first.id == second.id or first.kind != second.kind:
        return (words,)
    choices = subject_of(first).choice, subject_of(second).choice
    tables = _decisions(*choices, names), *parts_compared(*choices, names)
    return words, Section(name="differences", title="Differences", tables=tables)


def _words(first: AnyPlan, second: AnyPlan, names: tuple[str, str]) -> Iterator[str]:
    """Yield the answer: both steps, then the changed inputs, then the changed decisions."""
    if first.id == second.id:
        yield f"{names[0]} and {names[1]} are the same plan."
        return
    for name, plan in zip(names, (first, second), strict=True):
        step = f"{format_seconds(plan.step_seconds)} a step, {plan_scope(plan)}"
        yield f"{name}: {plan.name}, {step}."
    if first.kind != second.kind:
        yield "Their steps are not of the same work, so that their times are not compared."
        return
    if changed := ", ".join(changed_inputs(first, second)):
        yield f"{names[1]} has {changed}."
    yield from compare(first, second)


def whatif_sections(answer: WhatIfAnswer) -> tuple[Section, ...]:
    """Return the changes, their effects on the plan, and the reason for the new plan."""
    changes, *effects = answer.words
    after = answer.after
    reason = binding_words(after.best) if after.kind == "training" else after.decision.why
    section = Section(
        name="answer",
        title=changes,
        doubts=suspect_words(after, answer.before.inputs.profile),
        paragraphs=(*effects, sentence(reason)),
    )
    return (section,)


def parts_compared(
    chosen: ComparedChoice, rival: ComparedChoice, names: tuple[str, str]
) -> tuple[Table, ...]:
    """Return a table of the parts of two steps; empty if a choice has no parts."""
    difference, before, after = difference_of(chosen, rival), chosen.parts, rival.parts
    rows = [
        (name, before.get(name, 0.0), after.get(name, 0.0), more)
        for name, more in difference.parts.items()
        if before.get(name) or after.get(name)
    ]
    if not rows:
        return ()
    rows.append(("step", chosen.step_seconds, rival.step_seconds, difference.seconds))
    table = Table.of(
        "parts",
        rows,
        {
            "part": lambda row: row[0],
            names[0]: lambda row: Cell.seconds(row[1]),
            names[1]: lambda row: Cell.seconds(row[2]),
            "more": lambda row: Cell.seconds(row[3]),
            "of the step": lambda row: Cell.share(row[3] / chosen.step_seconds, sign=True),
        },
    )
    return (table,)


def _decisions(chosen: ComparedChoice, rival: ComparedChoice, names: tuple[str, str]) -> Table:
    before, after = chosen.decision, rival.decision
    return Table.of(
        "decisions",
        [name for name in dict.fromkeys((*before, *after)) if before.get(name) != after.get(name)],
        {
            "decision": lambda name: name,
            names[0]: lambda name: before.get(name, "–"),
            names[1]: lambda name: after.get(name, "–"),
        },
        empty="Both decide the same.",
    )
