"""Sensitivity of a plan's step to the parts of its machine and to the plan's decisions.

Each part of the machine gets 1 % slower and 1 % faster while the plan's choice stays fixed. Each
decision moves to its neighbours.
"""

from math import inf

from moetune.app.subjects import Subject
from moetune.app.subjects.values import Neighbour, is_same_step
from moetune.domain.errors import InputError
from moetune.domain.units import format_seconds
from moetune.fit.speeds import Slowdown
from moetune.report.sensitivity import PERCENT, KnobEffect, PartEffect, Sensitivity, part_words

_NOTHING = 1e-7
"""Parts are left out if 1 % of their time changes the step by a smaller share."""


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
        parts=tuple(
            PartEffect(
                part=part, name=part_words(part), seconds_per_percent=seconds,
                share_per_percent=seconds / step,
            ) for part, seconds in ordered
        ),
        knobs=tuple(sorted(knobs, key=lambda knob: inf if knob.seconds is None else knob.seconds)),
        without_effect=tuple(part for part in effects if part not in effective),
    )  # fmt: skip


def _knob(moved: Neighbour, step: float) -> KnobEffect:
    seconds = None if moved.step_seconds is None else moved.step_seconds - step
    return KnobEffect(
        knob=moved.knob, choice=moved.choice, seconds=seconds,
        share=None if seconds is None else seconds / step, note=moved.note,
    )  # fmt: skip


def _seconds_per_percent(subject: Subject, part: str) -> float:
    """Return the slope of the step over a part's time; at a kink, the mean of both sides."""
    slower, faster = (
        subject.seconds(Slowdown(part=part, factor=factor)) for factor in (1 + PERCENT, 1 - PERCENT)
    )
    return (slower - faster) / 2
