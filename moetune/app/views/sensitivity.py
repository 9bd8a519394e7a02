"""A plan's sensitivity as sections: sentences, parts of the machine, and decisions."""

from collections.abc import Iterator, Sequence

from moetune.app.sensitivity import (
    OP_WORDS,
    KnobEffect,
    PartEffect,
    Sensitivity,
    part_words,
)
from moetune.fit.speeds import BANDWIDTH, START
from moetune.report.section import Cell, Section, Table


def sensitivity_sections(found: Sensitivity) -> tuple[Section, ...]:
    """Return the answer in words, then the parts by their effect, then the decisions."""
    title, *rest = found.words
    without = ", ".join(_shortest(found.without_effect))
    return (
        Section(name="answer", title=title, paragraphs=(f"The plan: {found.choice}.", *rest)),
        Section(
            name="parts",
            title="Parts of the machine",
            tables=(_parts(found),),
            notes=(f"Without effect: {without}.",) if without else (),
        ),
        Section(
            name="knobs",
            title="Decisions of the plan",
            tables=(_knobs(found),),
            notes=tuple(
                f"{one.choice} cannot be had: {one.note}."
                for one in found.knobs
                if one.seconds is None
            ),
        ),
    )


def _shortest(parts: Sequence[str]) -> Iterator[str]:
    """Yield the parts in words; a collective of which neither part counts by its name alone."""
    for part in parts:
        op, _, which = part.rpartition(" ")
        other = f"{op} {BANDWIDTH if which == START else START}"
        if op in OP_WORDS and other in parts:
            if which == BANDWIDTH:
                yield OP_WORDS[op]
        else:
            yield part_words(part)


def _parts(found: Sensitivity) -> Table:
    return Table(
        name="parts",
        header=("part", "for 1 % more time", "of the step"),
        rows=tuple(map(_part, found.parts)),
    )


def _part(one: PartEffect) -> tuple[Cell, ...]:
    return (
        Cell.words(one.name),
        Cell.seconds(one.seconds_per_percent),
        Cell.share(one.share_per_percent, digits=3),
    )


def _knobs(found: Sensitivity) -> Table:
    return Table(
        name="knobs",
        header=("decision", "instead", "longer by", "of the step", "note"),
        rows=tuple(map(_knob, found.knobs)),
        wide=("of the step",),
        empty="The plan has no decision to move.",
    )


def _knob(one: KnobEffect) -> tuple[Cell, ...]:
    return (
        Cell.words(one.knob),
        Cell.words(one.choice),
        Cell.seconds(one.seconds),
        Cell.share(one.share, sign=True),
        Cell.words("cannot be had" if one.seconds is None else one.note),
    )
