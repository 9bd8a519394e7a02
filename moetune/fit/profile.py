"""Fit of a profile: samples to α–β lines with their errors."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from moetune.domain.cluster import Fingerprint, Machine
from moetune.domain.errors import ProfileError
from moetune.domain.gemm_forms import even_form
from moetune.domain.profile import CollectiveLine, CopyLine, FitError, GemmLine, Profile
from moetune.domain.samples import Quality, Sample
from moetune.fit.bursts import bursts_of
from moetune.fit.gemm import Surface
from moetune.fit.interference import interference_of
from moetune.fit.left_out import interpolation_errors
from moetune.fit.line import fit_line, line_intervals
from moetune.fit.pool import GemmKey, Pool, Series, pool

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
    """Return the summary of a fit; None without leave-one-out errors.

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


def fit_profile(
    *,
    name: str,
    machine: Machine,
    fingerprint: Fingerprint,
    samples: Iterable[Sample],
    seed: int = 0,
) -> Profile:
    """Return the measured profile: a line with its error for each operation, and the samples.

    Raw times of the same point are pooled, in whatever order they came. Samples with an error
    are stored but not fitted. An operation with a single size has a line through the origin and
    no error, as nothing can be left out.

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
    found = pool(measured)
    return Profile(
        name=name,
        provenance="measured",
        machine=machine,
        gemm=_gemm_lines(found, seed),
        collective=_collective_lines(found, seed),
        bursts=bursts_of(measured, found.collective),
        copy=_copy_lines(found, seed),
        interference=interference_of(found.interference),
        fingerprint=fingerprint,
        samples=measured,
    )


def _gemm_lines(found: Pool, seed: int) -> tuple[GemmLine, ...]:
    """Return one line over MACs for each dtype, whatever the shape and the form but uneven ones."""
    lines = []
    even = {key: series for key, series in found.gemm.items() if key[1] == even_form(key[1])}
    for dtype in sorted({dtype for dtype, _, _ in even}):
        forms = {key: series for key, series in even.items() if key[0] == dtype}
        sizes, times, medians = _over_macs(forms)
        cost = fit_line(sizes=sizes, seconds=medians)
        errors = _gemm_errors(found, dtype, cost.alpha_seconds)
        lines.append(
            GemmLine(
                dtype=dtype,
                alpha_seconds=cost.alpha_seconds,
                beta_seconds_per_mac=cost.beta_seconds,
                error=_error(sizes, times, errors, seed),
            )
        )
    return tuple(lines)


def _over_macs(
    forms: Mapping[GemmKey, Series],
) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...], tuple[float, ...]]:
    """Return MACs, raw times and medians of all points; the same MACs may come several times."""
    points = [
        (rows * math.prod(shape), times, median)
        for (_, _, shape), series in forms.items()
        for rows, times, median in zip(series.sizes, series.times, series.medians, strict=True)
    ]
    macs, times, medians = zip(*points, strict=True)
    return macs, times, medians


def _gemm_errors(found: Pool, dtype: str, alpha_seconds: float) -> list[float]:
    """Return the errors of rows left out; where no shape has enough rows, of shapes left out."""
    surfaces = [
        Surface(
            shapes={
                shape: series
                for (one, form, shape), series in found.gemm.items()
                if (one, form) == (dtype, product)
            },
            family=product,
            alpha_seconds=alpha_seconds,
        )
        for product in sorted({form for one, form, _ in found.gemm if one == dtype})
    ]
    by_rows = [error for surface in surfaces for error in surface.row_errors()]
    return by_rows or [error for surface in surfaces for error in surface.shape_errors()]


def _collective_lines(found: Pool, seed: int) -> tuple[CollectiveLine, ...]:
    lines = []
    for (op, group_size, num_nodes, in_flight), series in found.collective.items():
        alpha, beta, error = _line(series, seed)
        lines.append(
            CollectiveLine(
                op=op,
                group_size=group_size,
                num_nodes=num_nodes,
                in_flight=in_flight,
                alpha_seconds=alpha,
                beta_seconds_per_byte=beta,
                error=error,
            )
        )
    return tuple(lines)


def _copy_lines(found: Pool, seed: int) -> tuple[CopyLine, ...]:
    lines = []
    for (direction, pinned, both_ways), series in found.copy.items():
        alpha, beta, error = _line(series, seed)
        lines.append(
            CopyLine(
                direction=direction,
                pinned=pinned,
                both_ways=both_ways,
                alpha_seconds=alpha,
                beta_seconds_per_byte=beta,
                error=error,
            )
        )
    return tuple(lines)


def _line(series: Series, seed: int) -> tuple[float, float, FitError | None]:
    cost = fit_line(sizes=series.sizes, seconds=series.medians)
    errors = interpolation_errors(
        sizes=series.sizes, seconds=series.medians, alpha_seconds=cost.alpha_seconds
    )
    return cost.alpha_seconds, cost.beta_seconds, _error(series.sizes, series.times, errors, seed)


def _error(
    sizes: tuple[float, ...], times: tuple[tuple[float, ...], ...], errors: list[float], seed: int
) -> FitError | None:
    alpha_seconds, beta_seconds = line_intervals(
        sizes=sizes, times=times, rng=np.random.default_rng(seed)
    )
    return fit_error(
        errors=errors,
        num_points=len(sizes),
        domain=(min(sizes), max(sizes)),
        alpha_seconds=alpha_seconds,
        beta_seconds=beta_seconds,
    )
