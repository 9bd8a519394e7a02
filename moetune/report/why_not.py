"""Another choice next to a plan's choice, and sentences on why the plan has not taken it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from moetune.domain.document import encode
from moetune.domain.errors import MoetuneError
from moetune.domain.plan import Plan
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
class ComparedChoice:
    """A choice with its predicted step.

    Args:
        name: degree, strategy or layout, in words.
        decision: the same for programs, by the names of the flags.
        p05_step_seconds, p95_step_seconds: None if the plan has no range for the choice.
        parts: seconds that add up to the step, by name; empty if only the step was kept.
        work: seconds of each resource undisturbed, hidden or not; empty for whole models.
        needed_bytes: memory of a device; None if only the step was kept.
    """

    name: str
    decision: Mapping[str, str]
    step_seconds: float
    p05_step_seconds: float | None = None
    p95_step_seconds: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    work: Mapping[str, float] = field(default_factory=dict)
    needed_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    """Seconds that the other choice takes longer; negative if it is shorter.

    Args:
        share: the difference as a share of the plan's step.
        parts: difference of each part, the largest first.
    """

    seconds: float
    share: float
    parts: Mapping[str, float]


def difference_of(chosen: ComparedChoice, rival: ComparedChoice) -> StepDifference:
    """Return the rival's step minus the chosen step, with parts if both choices have them."""
    left, right = chosen.parts, rival.parts
    names = dict.fromkeys((*left, *right)) if left and right else {}
    more = {name: right.get(name, 0.0) - left.get(name, 0.0) for name in names}
    seconds = rival.step_seconds - chosen.step_seconds
    return StepDifference(
        seconds=seconds,
        share=seconds / chosen.step_seconds,
        parts=dict(sorted(more.items(), key=lambda item: (-abs(item[1]), item[0]))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The rule that refuses a choice, and a hint at the nearest allowed choice."""

    what: str
    hint: str

    @classmethod
    def of(cls, error: MoetuneError) -> "Refusal":
        """Return an error's text as a refusal."""
        return cls(what=error.what, hint=error.hint)


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


def drift_words(step_seconds: float) -> str:
    """Return that this version of moetune predicts other seconds than the plan has."""
    step = format_seconds(step_seconds)
    note = f"This version of moetune predicts {step} for the plan's choice"
    return f"{note}: make the plan again to compare like with like"


def kept_words(profile: str) -> str:
    """Return that without its profile a plan compares only the choices that it kept."""
    return (
        f"Profile {profile!r} is not here, or has changed: this is the fastest such choice that "
        "the plan has kept, and others were not compared"
    )


def placed_otherwise(plan: Plan, changed: Plan) -> Iterator[str]:
    """Yield a note if another choice's plan places its experts differently."""
    if changed.experts != plan.experts and changed.placement is not None:
        how = "are placed by their loads" if changed.experts else "keep their order"
        why = changed.placement.why
        yield f"with this choice experts {how}, and not as in the plan: {why}"


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
