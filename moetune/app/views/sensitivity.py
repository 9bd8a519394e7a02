"""A plan's sensitivity as sections: sentences, parts of the machine, and decisions."""

from collections.abc import Iterator, Sequence

from moetune.app.sensitivity import OP_WORDS, Sensitivity, part_words
from moetune.fit.speeds import BANDWIDTH, START
from moetune.report.section import Cell, Section, Table


def sensitivity_sections(effects: Sensitivity) -> tuple[Section, ...]:
    """Return the answer in words, then the parts by their effect, then the decisions."""
    title, *rest = effects.words
    without = ", ".join(_shortest(effects.without_effect))
    return (
        Section(name="answer", title=title, paragraphs=(f"The plan: {effects.choice}.", *rest)),
        Section(
            name="parts",
            title="Parts of the machine",
            tables=(_parts(effects),),
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
    """Yield the parts in words; a collective of which neither part counts by its name alone."""
    for part in parts:
        op, _, which = part.rpartition(" ")
        counterpart = f"{op} {BANDWIDTH if which == START else START}"
        if op in OP_WORDS and counterpart in parts:
            if which == BANDWIDTH:
                yield OP_WORDS[op]
        else:
            yield part_words(part)


def _parts(effects: Sensitivity) -> Table:
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
