"""Questions to subjects and their answers: choices and differences between choices."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from moetune.domain.any_plan import AnyPlan
from moetune.domain.errors import ProfileError
from moetune.domain.profile import Profile
from moetune.report.why_not import ComparedChoice, Refusal
from moetune.solve.trace import TraceSpan

GIB = 2**30
_SAME = 1e-9
"""Largest relative difference of equal steps in two versions of moetune."""


@dataclass(frozen=True, kw_only=True)
class PricedPlan:
    """A plan that is priced again.

    Args:
        profile: the profile that the plan was made with; None if it is missing or has changed.
        missing: why there is no profile.
    """

    plan: AnyPlan
    profile: Profile | None = None
    missing: str = ""

    @property
    def machine(self) -> Profile:
        """The profile to price with; raises ProfileError if it is missing or has changed."""
        if self.profile is None:
            raise ProfileError(
                f"{self.missing}: plan {self.plan.id[:6]}",
                "make the plan again, or name its profile",
            )
        return self.profile


def is_same_step(now: float, recorded: float) -> bool:
    """Return whether this version of moetune predicts the seconds that a plan recorded."""
    return math.isclose(now, recorded, rel_tol=_SAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """A question on another choice of a plan; None for values that the solver decides.

    Args:
        degree: number of chunks in both phases.
        layout: a training layout: "tp=2,pp=4", or as plans print it.
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
        """The degree by the names of both phases' flags; empty without a degree."""
        phases = ("forward-degree", "backward-degree")
        return {} if self.degree is None else dict.fromkeys(phases, str(self.degree))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question's values: as texts by flag, and as pins for the planner."""

    texts: Mapping[str, str]
    pins: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instead:
    """The best plan with the asked pins.

    Args:
        choice: the plan's choice; None if a rule refuses it.
        refused: the rule that refuses it, or why it does not fit; None if it fits.
        probability_faster: probability that it is faster than the first plan; None if unknown.
        notes: remarks that a reader of these numbers has to know.
    """

    choice: ComparedChoice | None = None
    refused: Refusal | None = None
    probability_faster: float | None = None
    notes: tuple[str, ...] = ()


class LostChoice(NamedTuple):
    """A candidate with the values that a plan keeps, and why it lost; "" if its parts say it."""

    choice: ComparedChoice
    lost_because: str = ""


class Neighbour(NamedTuple):
    """A decision of the plan moved to a neighbour; without seconds if it is not possible."""

    knob: str
    choice: str
    step_seconds: float | None
    note: str = ""


class Timelines(NamedTuple):
    """Spans of each process of a step, and the hidden shares of its communication."""

    processes: Sequence[tuple[str, Sequence[TraceSpan]]]
    overlap: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()
