"""α–β lines by relative least squares, their intervals, and several of them in a row."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from moetune.fit.curve import curve_through
from moetune.fit.line import fit_line, line_intervals, resampled_medians

SIZES = tuple(float(2**at) for at in range(10, 31))


def noisy_times(
    truth: list[float], rng: np.random.Generator, *, blocks: int = 20
) -> list[tuple[float, ...]]:
    """Block times with 4 % noise and one straggler of 1.5 to 6 times in twenty."""
    times = []
    for seconds in truth:
        drawn = seconds * np.exp(0.04 * rng.normal(size=blocks))
        late = rng.random(blocks) < 0.05
        times.append(tuple((drawn * np.where(late, rng.uniform(1.5, 6, blocks), 1)).tolist()))
    return times


def three_regimes(size: float) -> float:
    """Three protocols of which the library takes the fastest, as NCCL's do."""
    return min(6e-6 + size / 2e9, 20e-6 + size / 10e9, 60e-6 + size / 20e9)


@pytest.mark.parametrize("seed", range(5))
def test_line_recovers_start_up_and_rate_despite_noise_and_stragglers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    times = noisy_times([20e-6 + size * 3e-10 for size in SIZES], rng)

    line = fit_line(sizes=SIZES, seconds=[float(np.median(one)) for one in times])

    assert line.alpha_seconds == pytest.approx(20e-6, rel=0.03)
    assert line.beta_seconds == pytest.approx(3e-10, rel=0.03)


@given(st.lists(st.tuples(st.floats(1, 1e12), st.floats(1e-8, 1e4)), min_size=1, max_size=20))
def test_alpha_is_never_negative_and_beta_always_positive(
    points: list[tuple[float, float]],
) -> None:
    line = fit_line(sizes=[size for size, _ in points], seconds=[one for _, one in points])

    assert line.alpha_seconds >= 0
    assert line.beta_seconds > 0
    assert math.isfinite(line.alpha_seconds + line.beta_seconds)


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.floats(1e-5, 1e-1)),
        min_size=3,
        max_size=12,
        unique_by=lambda one: one[0],
    )
)
def test_line_misses_by_no_more_than_the_non_negative_least_squares_of_scipy(
    points: list[tuple[int, float]],
) -> None:
    sizes = np.array([2.0**at for at, _ in points])
    seconds = np.array([one for _, one in points])
    features = np.stack([1 / seconds, sizes / seconds], axis=1)

    line = fit_line(sizes=sizes.tolist(), seconds=seconds.tolist())

    ours = np.linalg.norm(features @ [line.alpha_seconds, line.beta_seconds] - 1)
    least = nnls(features, np.ones(len(points)))[1]
    # A slope must be above 0, so a falling or flat curve misses by a little more.
    assert ours <= least * (1 + 1e-5) + 1e-5


def test_a_single_size_gives_a_line_through_the_origin() -> None:
    line = fit_line(sizes=[1000.0, 1000.0], seconds=[2e-3, 2e-3])

    assert line.alpha_seconds == 0
    assert line.beta_seconds == pytest.approx(2e-6)


def test_bootstrap_intervals_cover_the_truth_about_nine_times_in_ten() -> None:
    sizes = SIZES[::2]
    covered = np.zeros(2)
    for seed in range(100):
        rng = np.random.default_rng(seed)
        times = noisy_times([20e-6 + size * 3e-10 for size in sizes], rng)
        for at, ((low, high), truth) in enumerate(
            zip(line_intervals(sizes=sizes, times=times, rng=rng), (20e-6, 3e-10), strict=True)
        ):
            covered[at] += low <= truth <= high

    assert (covered >= 75).all(), covered
    assert (covered <= 99).all(), covered


def test_resampled_medians_spread_as_medians_of_fresh_blocks_do() -> None:
    rng = np.random.default_rng(1)
    fresh = np.median(np.exp(0.1 * rng.normal(size=(2000, 41))), axis=1)
    raw = np.exp(0.1 * rng.normal(size=(200, 41)))

    drawn = resampled_medians(times=raw.tolist(), num=200, rng=rng)

    assert drawn.shape == (200, 200)
    assert drawn.std(axis=0).mean() == pytest.approx(fresh.std(), rel=0.15)
    even = resampled_medians(times=[(1.0, 3.0)], num=500, rng=rng)
    assert set(even[:, 0].tolist()) == {1.0, 2.0, 3.0}


def test_interpolation_beats_one_line_on_three_regimes() -> None:
    between = [math.sqrt(one * two) for one, two in pairwise(SIZES)]
    errors: dict[str, list[float]] = {"curve": [], "line": []}
    for seed in range(10):
        times = noisy_times([three_regimes(size) for size in SIZES], np.random.default_rng(seed))
        medians = [float(np.median(one)) for one in times]
        curve = curve_through(sizes=SIZES, seconds=medians)
        line = fit_line(sizes=SIZES, seconds=medians)
        for size in between:
            truth = three_regimes(size)
            errors["curve"].append(abs(curve.predict(size).seconds / truth - 1))
            errors["line"].append(abs(line.seconds(size) / truth - 1))

    typical = {name: float(np.median(one)) for name, one in errors.items()}
    worst = {name: float(np.percentile(one, 95)) for name, one in errors.items()}
    assert typical["curve"] < 0.02
    assert typical["line"] > 0.08
    assert worst["curve"] < 0.04
    assert worst["line"] > 0.2
