"""What subjects yield to the questions that are asked of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moetune.app.compared import ComparedChoice
from moetune.domain.errors import ProfileError
from moetune.domain.layer import Workload
from moetune.domain.plan import Decision
from moetune.domain.profile import Profile
from moetune.solve.trace import TraceSpan

GIB = 2**30


def profile_of(plan_id: str, profile: Profile | None, missing: str) -> Profile:
    """Return the profile behind a plan, which is there.

    Raises:
        ProfileError: it is missing, or has changed.
    """
    if profile is None:
        raise ProfileError(
            f"{missing}: plan {plan_id[:6]}", "make the plan again, or name its own profile"
        )
    return profile


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """A step that this machine can run: a layer with its decision."""

    workload: Workload
    decision: Decision
