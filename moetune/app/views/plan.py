"""A plan of either kind as sections: its decision, reasons, alternatives and sensitivity."""

from collections.abc import Iterator, Sequence

from moetune.app.subjects import Subject
from moetune.app.views.comparison import parts_compared
from moetune.app.views.layer import answer_section
from moetune.app.views.layer_reasons import layer_reasons
from moetune.app.views.model import model_reasons, model_sections
from moetune.domain.units import format_share
from moetune.fit.speeds import BANDWIDTH, START
from moetune.report.section import Cell, Section, Table, facts, seconds_span, sentence
from moetune.report.sensitivity import OP_WORDS, Sensitivity, part_words
from moetune.report.why_not import ComparedChoice, WhyNotAnswer, difference_of
from moetune.report.words import Reasons, plan_scope, speed_words, suspect_words, trust_words

_RANGE = "the range that nine of ten such steps should lie in"
_NAMED = 3
"""Most parts of a difference that are named."""


def plan_sections(subject: Subject, *, is_page: bool = False) -> tuple[Section, ...]:
    """Return a plan's sections, the answer first; a page also has a layer's reasons.

    Raises:
        ProfileError: the profile lacks an operation.
    """
    if subject.kind == "training":
        return tuple(model_sections(subject))
    answer = answer_section(subject, has_reasons=is_page)
    return answer, *(_reasons(subject, layer_reasons(subject, is_drawn=True)) if is_page else ())


def explanation_sections(subject: Subject) -> tuple[Section, ...]:
    """Return the plan's decision, the reasons, and how far to trust it, for a screen."""
    plan = subject.plan
    of_kind = model_reasons(subject) if subject.kind == "training" else layer_reasons(subject)
    head = Section(
        name="plan",
        title=plan.name,
        scope=plan_scope(plan, profile=subject.profile),
        doubts=suspect_words(plan),
        paragraphs=(
            of_kind.decision,
            *of_kind.placement,
            f"Plan {plan.id[:6]}, made with profile {plan.inputs.profile}.",
        ),
    )
    return head, *_reasons(subject, of_kind), _trust(subject, of_kind.sure)


def _reasons(subject: Subject, of_kind: Reasons) -> Iterator[Section]:
    """Yield the reason, the pins, the terms, the alternatives and the ranges."""
    yield Section(name="why", title="Why", paragraphs=of_kind.why)
    if of_kind.pins:
        table = facts("constraints", of_kind.pins)
        yield Section(name="pins", title="Pinned or bounded", tables=(table,))
    yield from of_kind.terms
    yield Section(
        name="alternatives", title="Alternatives that lost", tables=(_alternatives(subject),),
        notes=of_kind.notes,
    )  # fmt: skip
    yield from of_kind.ranges


def _alternatives(subject: Subject) -> Table:
    choice, step = subject.choice, subject.choice.step_seconds
    return Table.of(
        "alternatives",
        subject.alternatives,
        {
            "choice": lambda lost: lost.choice.name,
            "step": lambda lost: Cell.seconds(lost.choice.step_seconds),
            "slower by": lambda lost: Cell.share(
                lost.choice.step_seconds / step - 1 if step else None, sign=True
            ),
            "because": lambda lost: lost.lost_because or _parts(choice, lost.choice),
        },
        wide=("slower by",),
        empty="The constraints leave no other choice.",
    )


def _parts(choice: ComparedChoice, lost: ComparedChoice) -> str:
    """Return the parts that differ most, in shares of the step: "exchange +3.2 %, experts −1 %"."""
    more = [*difference_of(choice, lost).parts.items()][:_NAMED]
    return ", ".join(
        f"{name} {format_share(seconds / choice.step_seconds, sign=True)}"
        for name, seconds in more
        if seconds
    )


def _trust(subject: Subject, sure: str) -> Section:
    plan, choice = subject.plan, subject.choice
    step, speed = choice.step_seconds, plan.throughput
    low, high = choice.p05_step_seconds or step, choice.p95_step_seconds or step
    return Section(
        name="trust",
        title="How far to trust it",
        paragraphs=(
            f"One step: {seconds_span(step, low, high)}, {_RANGE}.",
            *(() if speed is None else (f"Model FLOPs: {speed_words(speed)}.",)),
            f"The least certain number behind it is {trust_words(plan)}.",
            sure,
        ),
        notes=tuple(map(sentence, plan.warnings)),
    )


def why_not_sections(answer: WhyNotAnswer) -> tuple[Section, ...]:
    """Return the answer in words, and a table of both steps' parts."""
    title, *rest = answer.words
    tables: tuple[Table, ...] = ()
    if answer.other is not None and answer.verdict != "chosen":
        tables = parts_compared(answer.chosen, answer.other, ("plan", "asked"))
    return (
        Section(
            name="answer",
            title=sentence(title),
            paragraphs=tuple(rest),
            tables=tables,
            notes=tuple(map(sentence, answer.notes)),
        ),
    )


def sensitivity_sections(effects: Sensitivity) -> tuple[Section, ...]:
    """Return the answer in words, the machine's parts by their effect, and the decisions."""
    title, *rest = effects.words
    without = ", ".join(_shortest(effects.without_effect))
    return (
        Section(name="answer", title=title, paragraphs=(f"The plan: {effects.choice}.", *rest)),
        Section(
            name="parts",
            title="Parts of the machine",
            tables=(_machine_parts(effects),),
            notes=(f"Without effect: {without}.",) if without else (),
        ),
        Section(
            name="knobs",
            title="Decisions of the plan",
            tables=(_knobs(effects),),
            notes=tuple(
                f"{knob.choice} cannot be had: {knob.note}."
                for knob in effects.knobs
                if knob.seconds is None
            ),
        ),
    )


def _shortest(parts: Sequence[str]) -> Iterator[str]:
    """Yield parts in words; a collective with both parts in the list has its name only once."""
    for part in parts:
        op, _, which = part.rpartition(" ")
        counterpart = f"{op} {BANDWIDTH if which == START else START}"
        if op in OP_WORDS and counterpart in parts:
            if which == BANDWIDTH:
                yield OP_WORDS[op]
        else:
            yield part_words(part)


def _machine_parts(effects: Sensitivity) -> Table:
    return Table.of(
        "parts",
        effects.parts,
        {
            "part": lambda part: part.name,
            "for 1 % more time": lambda part: Cell.seconds(part.seconds_per_percent),
            "of the step": lambda part: Cell.share(part.share_per_percent, digits=3),
        },
    )


def _knobs(effects: Sensitivity) -> Table:
    return Table.of(
        "knobs",
        effects.knobs,
        {
            "decision": lambda knob: knob.knob,
            "instead": lambda knob: knob.choice,
            "longer by": lambda knob: Cell.seconds(knob.seconds),
            "of the step": lambda knob: Cell.share(knob.share, sign=True),
            "note": lambda knob: "cannot be had" if knob.seconds is None else knob.note,
        },
        wide=("of the step",),
        empty="The plan has no decision to move.",
    )
