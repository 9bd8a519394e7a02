"""What is asked of subjects, and what they answer: choices, and their differences."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moetune.domain.any_plan import AnyPlan
from moetune.domain.errors import MoetuneError, ProfileError
from moetune.domain.profile import Profile
from moetune.solve.trace import TraceSpan

GIB = 2**30
_SAME = 1e-9
"""Relative difference of a step that two versions of moetune may have."""


@dataclass(frozen=True, kw_only=True)
class PricedPlan:
    """A plan that is priced again.

    Args:
        profile: the one that the plan was made with; None where it was not found.
        missing: why it was not found.
    """

    plan: AnyPlan
    profile: Profile | None = None
    missing: str = ""

    @property
    def machine(self) -> Profile:
        """The profile that prices need; ProfileError where it is missing or has changed."""
        if self.profile is None:
            raise ProfileError(
                f"{self.missing}: plan {self.plan.id[:6]}",
                "make the plan again, or name its own profile",
            )
        return self.profile


def is_same_step(now: float, recorded: float) -> bool:
    """Return whether this version of moetune predicts the seconds that a plan has."""
    return math.isclose(now, recorded, rel_tol=_SAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """Another choice of a plan that is asked for; None for what is left to the solver.

    Args:
        degree: chunks, of both phases.
        layout: of a model's training: "tp=2,pp=4", or as plans print it.
    """

    degree: int | None = None
    strategy: str | None = None
    layout: str | None = None

    @property
    def is_asked(self) -> bool:
        """Whether any other choice is asked for."""
        return any(value is not None for value in (self.degree, self.strategy, self.layout))

    @property
    def degree_texts(self) -> dict[str, str]:
        """The degree by the names of both phases' flags; empty where none is asked for."""
        phases = ("forward-degree", "backward-degree")
        return {} if self.degree is None else dict.fromkeys(phases, str(self.degree))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked of one plan: by flag in texts, and as its planner takes it."""

    texts: Mapping[str, str]
    pins: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedChoice:
    """A choice with its predicted step.

    Args:
        name: degree, strategy or layout, in words.
        decision: the same for programs, by the names of the flags.
        p05_step_seconds, p95_step_seconds: None where the plan has no range for it.
        parts: seconds that add up to the step, by name; empty where only the step was kept.
        work: seconds of each resource undisturbed, hidden or not; empty of whole models.
        needed_bytes: of one device; None where only the step was kept.
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
    """By how much the other choice takes longer; negative where it is shorter.

    Args:
        share: of the plan's step.
        parts: of each part, the largest first.
    """

    seconds: float
    share: float
    parts: Mapping[str, float]


def difference_of(chosen: ComparedChoice, rival: ComparedChoice) -> StepDifference:
    """Return another step less the chosen one; parts where both choices have them."""
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
    """The rule that refuses a choice, and the nearest that is allowed."""

    what: str
    hint: str

    @classmethod
    def of(cls, error: MoetuneError) -> "Refusal":
        """Return what an error says."""
        return cls(what=error.what, hint=error.hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instead:
    """The best with what is asked of a plan.

    Args:
        choice: None where a rule refuses it.
        refused: by which rule, or why it does not fit; None where it does.
        probability_faster: that it is faster than the plan's own; None where it is not known.
        notes: what has to be known about these numbers.
    """

    choice: ComparedChoice | None = None
    refused: Refusal | None = None
    probability_faster: float | None = None
    notes: tuple[str, ...] = ()


class LostChoice(NamedTuple):
    """A candidate as far as a plan keeps it, and why it lost; "" where its parts say it."""

    choice: ComparedChoice
    lost_because: str = ""


class Neighbour(NamedTuple):
    """A decision of the plan moved, by its flag; without seconds where it cannot be had."""

    knob: str
    choice: str
    step_seconds: float | None
    note: str = ""


class Timelines(NamedTuple):
    """Bars of each process of a step, and shares of its communication behind computation."""

    processes: Sequence[tuple[str, Sequence[TraceSpan]]]
    overlap: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()
