"""Sensitivity of a plan's step to the parts of its machine and to the plan's decisions.

Each part of the machine gets 1 % slower and 1 % faster while the plan's choice stays fixed. Each
decision moves to its neighbours. `Planner.sensitivity` looks up the plan's profile; nothing is
stored.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from types import MappingProxyType

from moetune.app.subjects import Subject
from moetune.app.subjects.values import Neighbour, is_same_step
from moetune.domain.document import encode
from moetune.domain.errors import InputError
from moetune.domain.units import format_seconds
from moetune.fit.speeds import BANDWIDTH, INTERFERENCE, START, Slowdown

SENSITIVITY_SCHEMA = "moetune.sensitivity/1"
PERCENT = 0.01
_NOTHING = 1e-7
"""Parts are left out if 1 % of their time changes the step by a smaller share."""
_TIE = 1e-9
OP_WORDS: Mapping[str, str] = MappingProxyType({
    "all_to_all": "all-to-alls", "all_reduce": "all-reduces", "all_gather": "all-gathers",
    "reduce_scatter": "reduce-scatters", "send": "sends",
})  # fmt: skip
_NAMES: Mapping[str, str] = MappingProxyType({
    "gemm rate": "rate of GEMMs", "gemm start-up": "start-up time of GEMMs",
    INTERFERENCE: "interference of what overlaps",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PartEffect:
    """Effect of a part of the machine on the step.

    Args:
        name: the part in words.
        seconds_per_percent: seconds that the step gets longer for each percent that the part takes
            longer, with the plan's choice fixed.
    """

    part: str
    name: str
    seconds_per_percent: float
    share_per_percent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobEffect:
    """Effect of a decision of the plan, moved to a neighbour.

    Args:
        knob: the flag of the decision.
        choice: the neighbour, in words.
        seconds: seconds that the step gets longer; None if the neighbour is not possible.
        share: the same as a share of the plan's step.
        note: why the neighbour is not possible, or that it does not fit.
    """

    knob: str
    choice: str
    seconds: float | None
    share: float | None
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Effects on a plan's step.

    Args:
        plan: its id.
        choice: the plan's choice, in words.
        parts: effects of the machine's parts, the largest first.
        knobs: the plan's decisions at their neighbours, the shortest step first.
        without_effect: parts that do not change the step.
    """

    plan: str
    choice: str
    step_seconds: float
    parts: tuple[PartEffect, ...]
    knobs: tuple[KnobEffect, ...]
    without_effect: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """Sentences, the most important first."""
        return tuple(_words(self))

    @property
    def document(self) -> dict[str, object]:
        """The JSON document of `moetune sensitivity`."""
        return {"schema": SENSITIVITY_SCHEMA, **encode(self), "words": list(self.words)}


def check_same(subject: Subject) -> None:
    """Raise InputError if this version predicts another step than the plan has."""
    now, then = subject.seconds(), subject.choice.step_seconds
    if not is_same_step(now, then):
        raise InputError(
            f"this version of moetune predicts {format_seconds(now)} for plan "
            f"{subject.plan.id[:6]}, which has {format_seconds(then)}",
            "make the plan again",
        )


def sensitivity_of(subject: Subject) -> Sensitivity:
    """Return the effects of the machine's parts and of the plan's decisions on its step.

    Raises:
        InputError: this version of moetune predicts another step.
        ProfileError: the profile lacks an operation.
    """
    check_same(subject)
    step = subject.seconds()
    effects = {part: _seconds_per_percent(subject, part) for part in subject.parts}
    effective = {part: more for part, more in effects.items() if abs(more) > _NOTHING * step}
    ordered = sorted(effective.items(), key=lambda item: -abs(item[1]))
    knobs = (_knob(neighbour, step) for neighbour in subject.neighbours())
    return Sensitivity(
        plan=subject.plan.id,
        choice=subject.choice.name,
        step_seconds=step,
        parts=tuple(_part(part, seconds, step) for part, seconds in ordered),
        knobs=tuple(sorted(knobs, key=lambda knob: inf if knob.seconds is None else knob.seconds)),
        without_effect=tuple(part for part in effects if part not in effective),
    )


def _knob(moved: Neighbour, step: float) -> KnobEffect:
    seconds = None if moved.step_seconds is None else moved.step_seconds - step
    return KnobEffect(
        knob=moved.knob, choice=moved.choice, seconds=seconds,
        share=None if seconds is None else seconds / step, note=moved.note,
    )  # fmt: skip


def _part(part: str, seconds: float, step: float) -> PartEffect:
    share = seconds / step
    return PartEffect(
        part=part, name=part_words(part), seconds_per_percent=seconds, share_per_percent=share
    )


def part_words(part: str) -> str:
    """Return a part in words: "bandwidth of all-to-alls"."""
    for ending, words in ((BANDWIDTH, "bandwidth of"), (START, "start-up time of")):
        if part.endswith(ending) and not part.startswith("gemm"):
            return f"{words} {OP_WORDS.get(part[: -len(ending) - 1], part)}"
    return _NAMES.get(part, part)


def _seconds_per_percent(subject: Subject, part: str) -> float:
    """Return the slope of the step over a part's time; at a kink, the mean of both sides."""
    slower, faster = (
        subject.seconds(Slowdown(part=part, factor=factor)) for factor in (1 + PERCENT, 1 - PERCENT)
    )
    return (slower - faster) / 2


def _words(effects: Sensitivity) -> Iterator[str]:
    if not effects.parts:
        yield f"No part of the machine changes the step of {format_seconds(effects.step_seconds)}."
        return
    first, *following = effects.parts
    more, share = format_seconds(abs(first.seconds_per_percent)), abs(first.share_per_percent)
    yield (
        f"The step follows the {first.name} most: {more} for every percent, {100 * share:.2g} % of "
        f"its {format_seconds(effects.step_seconds)}."
    )
    if following:
        rest = [
            f"the {part.name} ({format_seconds(abs(part.seconds_per_percent))})"
            for part in following[:2]
        ]
        yield f"Then {' and '.join(rest)}."
    yield from _knob_words(effects)


def _knob_words(effects: Sensitivity) -> Iterator[str]:
    memory = next((knob for knob in effects.knobs if knob.knob == "memory-limit"), None)
    rest = [
        knob
        for knob in effects.knobs
        if knob is not memory and knob.seconds is not None and not knob.note
    ]
    if rest:
        nearest = rest[0]
        assert nearest.seconds is not None  # noqa: S101 - as filtered
        how = "longer" if nearest.seconds > 0 else "shorter"
        more = f"{format_seconds(abs(nearest.seconds))} {how}"
        if abs(nearest.seconds) <= _TIE * effects.step_seconds:
            more = "as long"
        yield f"Of its decisions' neighbours the best is {nearest.choice}: {more}."
    if memory is not None and memory.seconds is not None:
        gain = -memory.seconds
        what = (
            "nothing" if gain <= PERCENT * PERCENT * effects.step_seconds else format_seconds(gain)
        )
        yield f"One GiB more of a device's memory would save {what}."
