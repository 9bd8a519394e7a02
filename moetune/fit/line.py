"""α–β lines by relative least squares, with bootstrap intervals."""

from collections.abc import Sequence

import numpy as np

from moetune.domain.arrays import Floats
from moetune.domain.costs import LinearCost

# A flat curve still gets a slope above 0: it adds this share of α at the largest size.
_LEAST_SLOPE = 1e-6
# Below this share of its largest possible value a determinant is rounding: a single size.
_SINGULAR = 1e-12
_NUM_BOOTSTRAPS = 200
_INTERVAL_PERCENT = (5.0, 95.0)


def fit_line(*, sizes: Sequence[float], seconds: Sequence[float]) -> LinearCost:
    """Return the line with the least sum of squared relative errors, α ≥ 0 and β > 0.

        minimise Σ ((α + β·size) / seconds − 1)²

    A single size cannot tell a start-up time from a rate: the line goes through the origin.

    Args:
        sizes: positive, in any order.
        seconds: positive, one for each size.
    """
    alphas, betas = fit_lines(sizes=np.asarray(sizes, float), seconds=np.asarray([seconds], float))
    return LinearCost(alpha_seconds=float(alphas[0]), beta_seconds=float(betas[0]))


def fit_lines(*, sizes: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Return α ≥ 0 and β > 0 of many lines over the same sizes at once.

    The closed form of the normal equations; where a bound binds, the optimum lies on it.

    Args:
        sizes: shape (points,).
        seconds: shape (lines, points).

    Returns:
        α and β, each of shape (lines,).
    """
    largest = sizes.max()
    starts, rates = 1 / seconds, (sizes / largest) / seconds
    uu, uv, vv = ((one * other).sum(1) for one, other in (
        (starts, starts), (starts, rates), (rates, rates)
    ))  # fmt: skip
    u, v = starts.sum(1), rates.sum(1)
    determinant = uu * vv - uv * uv
    solvable = determinant > _SINGULAR * uu * vv
    divisor = np.where(solvable, determinant, 1.0)
    alpha = np.where(solvable, (u * vv - v * uv) / divisor, 0.0)
    beta = np.where(solvable, (v * uu - u * uv) / divisor, v / vv)
    beta = np.where(alpha < 0, v / vv, beta)
    alpha = np.maximum(alpha, 0.0)
    flat = beta <= _LEAST_SLOPE * alpha
    alpha = np.where(flat, u / uu, alpha)
    return alpha, np.where(flat, _LEAST_SLOPE * alpha, beta) / largest


def resampled_medians(
    *, times: Sequence[Sequence[float]], num: int, rng: np.random.Generator
) -> Floats:
    """Return medians of raw times drawn with replacement, point by point.

    Args:
        times: raw block times of each point.

    Returns:
        Shape (num, points).
    """
    columns = []
    for point in times:
        raw = np.asarray(point, float)
        drawn = np.sort(raw[rng.integers(0, raw.size, (num, raw.size))], axis=1)
        columns.append((drawn[:, (raw.size - 1) // 2] + drawn[:, raw.size // 2]) / 2)
    return np.stack(columns, axis=1)


def line_intervals(
    *, sizes: Sequence[float], times: Sequence[Sequence[float]], rng: np.random.Generator
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the bootstrap 90 % intervals of α and β.

    Raw block times are drawn again at every size, so the intervals cover the noise of the
    measurement; the curvature that a line misses is in the leave-one-out error.
    """
    medians = resampled_medians(times=times, num=_NUM_BOOTSTRAPS, rng=rng)
    alphas, betas = fit_lines(sizes=np.asarray(sizes, float), seconds=medians)
    alpha_low, alpha_high = np.percentile(alphas, _INTERVAL_PERCENT)
    beta_low, beta_high = np.percentile(betas, _INTERVAL_PERCENT)
    return (float(alpha_low), float(alpha_high)), (float(beta_low), float(beta_high))
