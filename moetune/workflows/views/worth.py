"""The measurements worth their time to a plan, and the plan that followed, as sections."""

from moetune.domain.model_plan import Confidence
from moetune.domain.plan import Plan
from moetune.domain.units import format_seconds
from moetune.report.section import Cell, Section, Table, percent, plural
from moetune.workflows.plan_changes import compare_decisions
from moetune.workflows.profile_for import ImprovedPlan, confidence_in
from moetune.workflows.views.decision import plan_decision
from moetune.workflows.worth import PlanWorth, WorthyOperations

_SAVED = (
    "Saved by knowing that line: of the average loss against the best choice, and of the width "
    "of the range."
)
_NOTHING = (
    "Nothing is worth measuring for it: if all of its operations were known exactly, it would "
    "hardly be surer. The rest is the difference between whole steps and the sum of their "
    "operations."
)
_HIDDEN = "Below 0: errors of that line hide those of others, which have to be known as well."


def worth_section(plan: Plan, worth: PlanWorth) -> Section:
    """Return what would be measured for the plan, and what that is expected to change."""
    now = f"{plan_decision(plan)} Now: {_words(worth.before)}."
    known = f"With the operations below known exactly: {_words(worth.after)}."
    if not worth.groups:
        known = _NOTHING
    notes = tuple(
        f"Out of reach, as it needs more ranks than the profile has: {one}."
        for one in worth.out_of_reach
    )
    return Section(
        name="worth",
        title=f"Worth measuring for plan {plan.id[:6]}",
        paragraphs=(now, known),
        tables=(_table(worth),) if worth.groups else (),
        notes=notes,
    )


def improved_section(improved: ImprovedPlan) -> Section:
    """Return what changed between the two plans."""
    before, after = confidence_in(improved.before), confidence_in(improved.after)
    sure = [
        f"{when}: {_words(found)}."
        for when, found in (("Before", before), ("Now", after))
        if found is not None
    ]
    return Section(
        name="improved",
        title=f"Plan {improved.after.id[:6]}",
        paragraphs=(*compare_decisions(improved.before, improved.after), *sure),
    )


def _table(worth: PlanWorth) -> Table:
    hides = any(min(one.regret_saved, one.range_saved) < 0 for one in worth.groups)
    return Table(
        name="operations",
        header=("operations", "points", "loss saved", "range saved"),
        rows=tuple(
            (
                Cell.words(_operations(group)),
                Cell.count(len(group.points)),
                Cell.share(group.regret_saved, digits=2),
                Cell.share(group.range_saved, digits=0),
            )
            for group in worth.groups
        ),
        notes=(_SAVED, _HIDDEN) if hides else (_SAVED,),
    )


def _operations(group: WorthyOperations) -> str:
    first, *others = group.operations
    return f"{first} and {plural(len(others), 'more', 'more')}" if others else first


def _words(confidence: Confidence) -> str:
    low, high = map(format_seconds, (confidence.p05_step_seconds, confidence.p95_step_seconds))
    loss = percent(confidence.expected_regret, digits=2)
    return (
        f"{loss} slower than the best choice on average, nine steps of ten between {low} and {high}"
    )
