"""From leave-one-out errors to a label."""

from collections.abc import Sequence

import numpy as np

from moetune.domain.profile import FitError
from moetune.domain.samples import Quality

# Largest median and 95th percentile of the relative error that each label allows.
_GOOD = (0.05, 0.15)
_USABLE = (0.10, 0.30)


def label(*, median: float, p95: float) -> Quality:
    """Return the label of a fit with those leave-one-out errors."""
    if median <= _GOOD[0] and p95 <= _GOOD[1]:
        return "good"
    return "usable" if median <= _USABLE[0] and p95 <= _USABLE[1] else "suspect"


def fit_error(
    *,
    errors: Sequence[float],
    num_points: int,
    domain: tuple[float, float],
    alpha_seconds: tuple[float, float],
    beta_seconds: tuple[float, float],
) -> FitError | None:
    """Return the summary of a fit, None where there was nothing to leave out.

    Args:
        errors: leave-one-out |relative error| of the prediction.
        domain: smallest and largest measured size.
        alpha_seconds, beta_seconds: bootstrap 90 % intervals.
    """
    if not errors:
        return None
    median, p95 = float(np.median(errors)), float(np.percentile(errors, 95))
    return FitError(
        num_points=num_points,
        median=median,
        p95=p95,
        low=domain[0],
        high=domain[1],
        quality=label(median=median, p95=p95),
        alpha_seconds=alpha_seconds,
        beta_seconds=beta_seconds,
    )
