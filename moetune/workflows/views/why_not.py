"""The answer to "why not this one" as sections: sentences, and the parts of both steps."""

from moetune.report.section import Cell, Section, Table, sentence
from moetune.workflows.compared import WhyNotAnswer


def why_not_sections(answer: WhyNotAnswer) -> tuple[Section, ...]:
    """Return the answer in words, and what both steps consist of."""
    title, *rest = answer.words
    return (
        Section(
            name="answer",
            title=sentence(title),
            paragraphs=tuple(rest),
            tables=_parts(answer),
            notes=tuple(map(sentence, answer.notes)),
        ),
    )


def _parts(answer: WhyNotAnswer) -> tuple[Table, ...]:
    own, other, found = answer.chosen, answer.other, answer.difference
    if other is None or found is None or not found.parts or answer.verdict == "chosen":
        return ()
    rows = [
        (name, own.parts.get(name, 0.0), other.parts.get(name, 0.0), more)
        for name, more in found.parts.items()
        if own.parts.get(name) or other.parts.get(name)
    ]
    rows.append(("step", own.step_seconds, other.step_seconds, found.seconds))
    return (
        Table(
            name="parts",
            header=("part", "plan", "this one", "more", "of the step"),
            rows=tuple(
                (
                    Cell.words(name),
                    *map(Cell.seconds, seconds),
                    Cell.share(seconds[-1] / own.step_seconds, sign=True),
                )
                for name, *seconds in rows
            ),
        ),
    )
