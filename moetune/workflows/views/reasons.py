"""What an explanation shows of one kind of plan."""

from dataclasses import dataclass

from moetune.report.section import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons:
    """Sentences and sections of a plan; what a kind does not have is omitted.

    Args:
        words: on its routing and its experts' places.
        why: it is this choice.
        sure: how sure that is.
        pins: by their flags.
        terms: what time and memory consist of.
        notes: remarks on the alternatives.
        ranges: the choice for other sizes.
    """

    title: str
    scope: str
    words: tuple[str, ...]
    why: tuple[str, ...]
    sure: str
    pins: tuple[tuple[str, str], ...]
    terms: tuple[Section, ...]
    notes: tuple[str, ...] = ()
    ranges: tuple[Section, ...] = ()
