"""Worth of measuring: by how much a plan would be surer if an operation were known."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moetune.domain.costs import Costs
from moetune.domain.plan import Confidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """What knowing one family of operations would do for a plan.

    Args:
        regret_saved: of the expected relative loss; negative where its errors hid others'.
        range_saved: of the width of the step's 90 % range, relative to that width.
    """

    family: str
    regret_saved: float
    range_saved: float


def rank_by_worth(
    judge: Callable[[Sequence[Costs]], Confidence],
    resamples: Sequence[Costs],
    knowing: Mapping[str, Sequence[Costs]],
) -> tuple[Worth, ...]:
    """Return the families whose uncertainty moves the choice most, then those of its range.

    Args:
        judge: returns the confidence in a plan's choice under refits.
        resamples: refits with all uncertainty.
        knowing: by family, refits in which that family is as it was measured.
    """
    before = judge(resamples)
    width = _width(before)
    found = []
    for family, refits in knowing.items():
        after = judge(refits)
        found.append(
            Worth(
                family=family,
                regret_saved=before.expected_regret - after.expected_regret,
                range_saved=1 - _width(after) / width if width else 0.0,
            )
        )
    return tuple(sorted(found, key=lambda one: (-one.regret_saved, -one.range_saved, one.family)))


def _width(confidence: Confidence) -> float:
    return confidence.p95_step_seconds - confidence.p05_step_seconds
