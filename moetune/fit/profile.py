"""Fit of a profile: samples to α–β lines by relative least squares, with their errors."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from moetune.domain.arrays import Floats
from moetune.domain.cluster import Fingerprint, Machine
from moetune.domain.cost_keys import CollectiveKey, CopyKey, GemmKey
from moetune.domain.costs import LinearCost
from moetune.domain.errors import ProfileError
from moetune.domain.profile import CollectiveLine, CopyLine, FitError, GemmLine, Profile
from moetune.domain.samples import Quality, Sample, even_form
from moetune.fit.curve import interpolation_errors
from moetune.fit.gemm import Surface
from moetune.fit.interference import interference_of
from moetune.fit.pool import Key, Pool, Series, pool, resampled_medians

_Line = TypeVar("_Line", CollectiveLine, CopyLine)
# Largest median and 95th percentile of the relative error that each label allows.
_GOOD = (0.05, 0.15)
_USABLE = (0.10, 0.30)
# A flat curve still gets a slope above 0: it adds this share of α at the largest size.
_LEAST_SLOPE = 1e-6
# Below this share of its largest possible value a determinant is rounding: a single size.
_SINGULAR = 1e-12
_NUM_BOOTSTRAPS = 200
_INTERVAL_PERCENT = (5.0, 95.0)


def label(*, median: float, p95: float) -> Quality:
    """Return the quality label of a fit with these leave-one-out errors."""
    if median <= _GOOD[0] and p95 <= _GOOD[1]:
        return "good"
    return "usable" if median <= _USABLE[0] and p95 <= _USABLE[1] else "suspect"


def fit_error(
    *, errors: Sequence[float], sizes: Sequence[float], times: Sequence[Sequence[float]], seed: int
) -> FitError | None:
    """Return the error summary of a fit, with its intervals; None without leave-one-out errors."""
    if not errors:
        return None
    alpha_seconds, beta_seconds = line_intervals(
        sizes=sizes, times=times, rng=np.random.default_rng(seed)
    )
    median, p95 = float(np.median(errors)), float(np.percentile(errors, 95))
    return FitError(
        num_points=len(sizes),
        median=median,
        p95=p95,
        low=min(sizes),
        high=max(sizes),
        quality=label(median=median, p95=p95),
        alpha_seconds=alpha_seconds,
        beta_seconds=beta_seconds,
    )


def fit_profile(
    *,
    name: str,
    machine: Machine,
    fingerprint: Fingerprint,
    samples: Iterable[Sample],
    seed: int = 0,
) -> Profile:
    """Return the measured profile: a line with its error for each operation, and the samples.

    Raw times of the same point are pooled, in whatever order they came. Samples with an error are
    stored but not fitted. An operation with a single size has a line through the origin and no
    error, because nothing can be left out.

    Args:
        seed: of the bootstrap; the same samples and seed give the same profile.

    Raises:
        ProfileError: no sample has a time.
    """
    measured = tuple(samples)
    if all(sample.error for sample in measured):
        raise ProfileError(
            f'profile "{name}" has no sample with a time ({len(measured)} failed)',
            f"measure again:  moetune profile --name {name}",
        )
    pooled = pool(measured)
    return Profile(
        name=name,
        provenance="measured",
        machine=machine,
        gemm=_gemm_lines(pooled, seed),
        collective=_lines(CollectiveKey, CollectiveLine, pooled, seed),
        copy=_lines(CopyKey, CopyLine, pooled, seed),
        interference=interference_of(pooled.interference),
        fingerprint=fingerprint,
        samples=measured,
    )


def _lines(kind: type[Key], line: type[_Line], pooled: Pool, seed: int) -> tuple[_Line, ...]:
    series = pooled.of(kind).items()
    return tuple(line(**key._asdict(), **_line(points, seed)) for key, points in series)


def _gemm_lines(pooled: Pool, seed: int) -> tuple[GemmLine, ...]:
    """Return a line over MACs for each dtype, from all even forms with a layer's usual kernel."""
    lines: list[GemmLine] = []
    series_of = {key: series for key, series in pooled.of(GemmKey).items() if not key.kernel}
    for dtype in sorted({key.dtype for key in series_of if key.product == even_form(key.product)}):
        forms = {key: series for key, series in series_of.items() if key.dtype == dtype}
        even = {
            key: series for key, series in forms.items() if key.product == even_form(key.product)
        }
        points = [
            (rows * math.prod(key.shape), times, median)
            for key, series in even.items()
            for rows, times, median in zip(series.sizes, series.times, series.medians, strict=True)
        ]
        sizes, times, medians = zip(*points, strict=True)
        cost = fit_line(sizes=sizes, seconds=medians)
        errors = _gemm_errors(forms, cost.alpha_seconds)
        lines.append(
            GemmLine(
                dtype=dtype,
                alpha_seconds=cost.alpha_seconds,
                beta_seconds_per_mac=cost.beta_seconds,
                error=fit_error(errors=errors, sizes=sizes, times=times, seed=seed),
            )
        )
    return tuple(lines)


def _gemm_errors(forms: Mapping[GemmKey, Series], alpha_seconds: float) -> list[float]:
    """Return the errors of left-out rows; if no shape has enough rows, those of left-out shapes."""
    surfaces = [
        Surface(
            shapes={key.shape: series for key, series in forms.items() if key.product == product},
            family=product,
            alpha_seconds=alpha_seconds,
        )
        for product in sorted({key.product for key in forms})
    ]
    by_rows = [error for surface in surfaces for error in surface.row_errors()]
    return by_rows or [error for surface in surfaces for error in surface.shape_errors()]


def _line(series: Series, seed: int) -> dict[str, Any]:
    """Return the fields of a profile's line over bytes."""
    cost = fit_line(sizes=series.sizes, seconds=series.medians)
    errors = interpolation_errors(
        sizes=series.sizes, seconds=series.medians, alpha_seconds=cost.alpha_seconds
    )
    return {
        "alpha_seconds": cost.alpha_seconds,
        "beta_seconds_per_byte": cost.beta_seconds,
        "error": fit_error(errors=errors, sizes=series.sizes, times=series.times, seed=seed),
    }


def fit_line(*, sizes: Sequence[float], seconds: Sequence[float]) -> LinearCost:
    """Return the line with the least sum of squared relative errors, α ≥ 0 and β > 0.

        minimise Σ ((α + β·size) / seconds − 1)²

    A single size cannot tell a start-up time from a rate: the line goes through the origin.
    """
    alphas, betas = fit_lines(sizes=np.asarray(sizes, float), seconds=np.asarray([seconds], float))
    return LinearCost(alpha_seconds=float(alphas[0]), beta_seconds=float(betas[0]))


def fit_lines(*, sizes: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Return α ≥ 0 and β > 0 of many lines over the same sizes at once, each of shape (lines,).

    The normal equations have a closed form; if a bound is active, the optimum lies on it.

    Args:
        sizes: shape (points,).
        seconds: shape (lines, points).
    """
    largest = sizes.max()
    starts, rates = 1 / seconds, (sizes / largest) / seconds
    uu, uv, vv = (
        (left * right).sum(1) for left, right in ((starts, starts), (starts, rates), (rates, rates))
    )
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


def line_intervals(
    *, sizes: Sequence[float], times: Sequence[Sequence[float]], rng: "np.random.Generator"
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return bootstrap 90 % intervals of α and β, from resampled raw block times."""
    medians = resampled_medians(times=times, num=_NUM_BOOTSTRAPS, rng=rng)
    alphas, betas = fit_lines(sizes=np.asarray(sizes, float), seconds=medians)
    alpha_low, alpha_high = np.percentile(alphas, _INTERVAL_PERCENT)
    beta_low, beta_high = np.percentile(betas, _INTERVAL_PERCENT)
    return (float(alpha_low), float(alpha_high)), (float(beta_low), float(beta_high))
