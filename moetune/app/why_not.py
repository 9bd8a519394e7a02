"""Another choice next to the plan's choice: the answer to "why not this layout".

The other choice is the best under the asked pins, as in a what-if. Without the plan's profile it
is a candidate that the plan keeps.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from moetune.app.subjects import Subject
from moetune.app.subjects.values import (
    ComparedChoice,
    Refusal,
    StepDifference,
    WhyNot,
    difference_of,
    is_same_step,
)
from moetune.domain.document import encode
from moetune.domain.units import format_bytes, format_seconds, format_share
from moetune.report.section import chance
from moetune.solve.layer.degree import TIE

WHY_NOT_SCHEMA = "moetune.why-not/1"
ComparedVerdict = Literal[
    "chosen", "as_fast", "slower", "faster", "too_large", "refused"
]  # fmt: skip
_NAMED = 3
"""Most parts of a difference that are named."""
_SMALL = 5e-4
"""Differences of parts below this share of the step are not named."""
_WAYS = (
    "recompute", "dispatcher", "overlap", "zero", "schedule", "stages",
    "cuda-graphs", "offload-activations", "offload-optimizer",
)  # fmt: skip
"""Decisions that the name of a layout does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNotAnswer:
    """Another choice next to the plan's choice.

    Args:
        plan: its id.
        asked: the pinned values by flag.
        source: "plan" if the plan had kept the other choice, "solved" if it was solved now.
        chosen: the plan's choice.
        other: the best choice under the asked pins; None if a rule refuses it.
        limit_bytes: limit of a device; None if it is unknown without the profile.
        refused: the rule that refuses the other choice, or why it does not fit; None if it fits.
        probability_faster: probability that the other choice is faster, given the errors of the
            predictions; None if these are unknown.
        kept_because: the plan's reason why the other choice lost; "" if the plan does not keep it.
        rule: the rule by which a plan may prefer a slower choice.
        notes: remarks that a reader of these numbers has to know.
    """

    plan: str
    asked: Mapping[str, str]
    source: Literal["plan", "solved"]
    chosen: ComparedChoice
    other: ComparedChoice | None = None
    limit_bytes: int | None
    refused: Refusal | None = None
    probability_faster: float | None = None
    kept_because: str = ""
    rule: str = ""
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> ComparedVerdict:
        """The result of the comparison."""
        if self.other is None:
            return "refused"
        if self.refused is not None or not self.fits:
            return "too_large"
        if self.other.decision == self.chosen.decision:
            return "chosen"
        ratio = self.other.step_seconds / self.chosen.step_seconds
        if abs(ratio - 1) <= TIE:
            return "as_fast"
        return "slower" if ratio > 1 else "faster"

    @property
    def fits(self) -> bool:
        """Whether the other choice fits, or its memory or the limit is unknown."""
        needed = self.other.needed_bytes if self.other else None
        return needed is None or self.limit_bytes is None or needed <= self.limit_bytes

    @property
    def difference(self) -> StepDifference | None:
        """The other step minus the chosen step; None if a rule refuses the other choice."""
        return None if self.other is None else difference_of(self.chosen, self.other)

    @property
    def words(self) -> tuple[str, ...]:
        """Sentences, the most important first."""
        return tuple(_words(self))

    @property
    def document(self) -> dict[str, object]:
        """The JSON document of `moetune explain --degree …` and of the service."""
        return {
            "schema": WHY_NOT_SCHEMA,
            **encode(self),
            "verdict": self.verdict,
            "difference": encode(self.difference),
            "words": list(self.words),
        }


def answer_why_not(subject: Subject, question: WhyNot) -> WhyNotAnswer:
    """Return another choice next to the plan's choice.

    Raises:
        InputError: a value is not possible, or the plan has no such choice.
        ProfileError: the profile lacks an operation; or is missing, and the plan lacks the choice.
    """
    asked, choice = subject.asked(question), subject.choice
    answer = WhyNotAnswer(
        plan=subject.plan.id, asked=asked.texts, source="plan", chosen=choice,
        limit_bytes=subject.memory_limit_bytes,
    )  # fmt: skip
    if subject.profile is None:
        return _from_plan(subject, answer)
    answer = replace(answer, source="solved", notes=_drift_notes(subject))
    if asked.texts.items() <= choice.decision.items():
        return replace(answer, other=choice)
    instead = subject.instead(asked)
    return replace(
        answer, other=instead.choice, refused=instead.refused,
        probability_faster=instead.probability_faster,
        kept_because=_lost_because(subject, instead.choice) if instead.choice else "",
        rule="" if instead.refused else subject.rule, notes=(*answer.notes, *instead.notes),
    )  # fmt: skip


def _from_plan(subject: Subject, answer: WhyNotAnswer) -> WhyNotAnswer:
    """Return the fastest candidate with the asked values among those that the plan keeps."""
    if answer.asked.items() <= answer.chosen.decision.items():
        return replace(answer, other=answer.chosen)
    lost = [
        row for row in subject.alternatives if answer.asked.items() <= row.choice.decision.items()
    ]
    if not lost:
        _ = subject.machine  # which says that it is missing
    fastest = min(lost, key=lambda row: row.choice.step_seconds)
    note = (
        f"Profile {subject.plan.inputs.profile!r} is not here, or has changed: this is the fastest "
        "such choice that the plan has kept, and others were not compared"
    )
    return replace(answer, other=fastest.choice, kept_because=fastest.lost_because, notes=(note,))


def _lost_because(subject: Subject, choice: ComparedChoice) -> str:
    """Return the plan's reason why a choice lost; "" if the plan does not keep the choice."""
    for row in subject.alternatives:
        is_same = row.choice.decision.items() <= choice.decision.items()
        if is_same and is_same_step(row.choice.step_seconds, choice.step_seconds):
            return row.lost_because
    return ""


def _drift_notes(subject: Subject) -> tuple[str, ...]:
    """Return a note if this version predicts another step for the plan's choice."""
    now = subject.seconds()
    if is_same_step(now, subject.choice.step_seconds):
        return ()
    note = f"This version of moetune predicts {format_seconds(now)} for the plan's choice: "
    return (f"{note}make the plan again to compare like with like",)


def _words(answer: WhyNotAnswer) -> Iterator[str]:
    chosen, rival = answer.chosen, answer.other
    if rival is None:
        assert answer.refused is not None  # noqa: S101 - there is no other reason for None
        yield f"It is impossible: {answer.refused.what}."
        if answer.refused.hint:
            yield f"{_capital(answer.refused.hint)}."
        yield f"The plan has {chosen.name}, in {format_seconds(chosen.step_seconds)} a step."
        return
    yield from _step_words(answer, rival)
    yield from _part_words(answer, rival)
    yield from _memory_words(answer, rival)
    if answer.kept_because and (answer.verdict != "slower" or not rival.parts):
        yield f"The plan says of it: {answer.kept_because}."
    if answer.probability_faster is not None and answer.verdict not in {"chosen", "too_large"}:
        yield (
            "How sure: the chance that it is the faster of the two is "
            f"{chance(answer.probability_faster)}, given the errors of such predictions."
        )


def _step_words(answer: WhyNotAnswer, rival: ComparedChoice) -> Iterator[str]:
    chosen, verdict = answer.chosen, answer.verdict
    step, mine = format_seconds(rival.step_seconds), format_seconds(chosen.step_seconds)
    if verdict == "chosen":
        yield f"This is the plan's choice: {chosen.name}, {mine} a step."
        return
    difference = answer.difference
    assert difference is not None  # noqa: S101 - there is another choice
    more = f"{format_seconds(abs(difference.seconds))} ({format_share(abs(difference.share))})"
    how = f"{more} {'longer' if difference.seconds > 0 else 'shorter'} than"
    if abs(difference.share) <= TIE:
        how = "as long as"
    if verdict == "too_large":
        what = answer.refused.what if answer.refused else "it needs more memory than there is"
        yield f"It does not fit: {what}."
        if answer.refused and answer.refused.hint:
            yield f"{_capital(answer.refused.hint)}."
        yield f"With enough memory {rival.name} would take {step} a step, {how} the plan's {mine}."
    else:
        yield f"With {rival.name} a step takes {step}, {how} the plan's {mine}."
    if chosen.name != rival.name:  # as sizes; decisions that differ follow
        yield f"The plan has {chosen.name}."
    yield from _way_words(chosen, rival)
    if verdict == "faster" and answer.rule:
        yield f"{_capital(answer.rule)}."


def _way_words(chosen: ComparedChoice, rival: ComparedChoice) -> Iterator[str]:
    """Yield the decisions that differ and are not part of the layouts' names."""
    mine, theirs = chosen.decision, rival.decision
    differing = [
        f"{name} {theirs[name]} instead of {mine[name]}"
        for name in _WAYS
        if name in mine and theirs.get(name, mine[name]) != mine[name] and name not in chosen.name
    ]
    if differing:
        yield f"Besides, {', '.join(differing)}."


def _part_words(answer: WhyNotAnswer, rival: ComparedChoice) -> Iterator[str]:
    difference, chosen = answer.difference, answer.chosen
    least = _SMALL * chosen.step_seconds
    parts = difference.parts.items() if difference else ()
    large = [(name, seconds) for name, seconds in parts if abs(seconds) > least]
    if large:
        said = [
            f"{format_seconds(abs(seconds))} {'more' if seconds > 0 else 'less'} of {name}"
            for name, seconds in large[:_NAMED]
        ]
        yield f"The difference: {', '.join(said)}."
    for name, seconds in rival.work.items():
        before = chosen.work.get(name)
        if before is not None and abs(seconds - before) > least:
            yield (
                f"All {name} of a step, hidden or not: {format_seconds(seconds)} instead of "
                f"{format_seconds(before)}."
            )


def _memory_words(answer: WhyNotAnswer, rival: ComparedChoice) -> Iterator[str]:
    if rival.needed_bytes is None or answer.verdict == "chosen":
        return
    needed = f"A device needs {format_bytes(rival.needed_bytes)}"
    if answer.limit_bytes is not None:
        needed += f" of {format_bytes(answer.limit_bytes)}"
    if answer.chosen.needed_bytes is not None:
        needed += f"; with the plan {format_bytes(answer.chosen.needed_bytes)}"
    yield f"{needed}."


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}"
