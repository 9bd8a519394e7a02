"""Plans of ours for the case, from the lab's own profile, and what they are predicted to take."""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.gradients.ranks import variant_parts
from benchmarks.joint.experiment import Case as JointCase
from benchmarks.joint.experiment import Planner
from benchmarks.rivals.case import Case
from moetune.domain.profile import Profile

_DEGREES_OF_BOTH = range(2, 9)
"""Chunks of each of two batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A way of ours.

    Args:
        variant: as in `benchmarks.joint`.
        predicted_seconds: of the step with its optimizer.
        is_plan: it is the joint plan.
    """

    variant: str
    predicted_seconds: float
    is_plan: bool

    @property
    def words(self) -> str:
        """What the table calls it."""
        way, degrees = variant_parts(self.variant)
        chunks = "/".join(map(str, dict.fromkeys(degrees)))
        batches = "two batches in turns, " if way == "two" else ""
        return f"{batches}{'one chunk' if chunks == '1' else f'{chunks} chunks'}"


def planned_ways(case: Case, profile: Profile) -> tuple[Planned, ...]:
    """Return the plan, and the ways beside it: one chunk, chunks, two batches, and both."""
    planner = Planner(
        JointCase(transformer=case.transformer, sequences=case.sequences, num_random=0), profile
    )
    plan, chunks = _as_run(planner.best(None)), _as_run(planner.best("chunks"))
    both = min((f"two:{one}" for one in _DEGREES_OF_BOTH), key=planner.step_seconds)
    ways: Mapping[str, None] = dict.fromkeys((plan, "default:1", chunks, "two:1", both))
    return tuple(
        Planned(
            variant=one, predicted_seconds=planner.step_seconds(one), is_plan=one == plan
        )
        for one in ways
    )  # fmt: skip


def _as_run(variant: str) -> str:
    """Return the way with gradients between exchanges, which `moetune.replicate` does by itself."""
    way, degrees = variant.split(":")
    return f"{'two' if way == 'two' else 'default'}:{degrees}"
