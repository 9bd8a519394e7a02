"""From samples to a profile: its lines with their intervals, and the summary of its errors."""

import json
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from moetune.domain.cost_keys import CollectiveKey
from moetune.domain.document import canonical_json
from moetune.domain.errors import ProfileError
from moetune.domain.profile import FitError, profile_from_document
from moetune.domain.samples import (
    CollectivePoint,
    CopyPoint,
    GemmPoint,
    InterferencePoint,
    Point,
    RowsPoint,
    Sample,
)
from moetune.fit.costs import costs_of
from moetune.fit.profile import fit_error, fit_line, line_intervals
from tests.fit.measured import FINGERPRINT, MACHINE, fitted


def all_to_all(num_bytes: int, *seconds: float, in_flight: int = 1, ranks: int = 2) -> Sample:
    point = CollectivePoint(
        op="all_to_all", group_size=ranks, num_bytes=num_bytes, in_flight=in_flight
    )
    return Sample(point=point, seconds=seconds)


def noisy(truth: Callable[[int], float], sizes: Sequence[int], seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        all_to_all(size, *(truth(size) * np.exp(0.02 * rng.normal(size=20))).tolist())
        for size in sizes
    ]


def test_profile_has_a_line_for_every_operation_that_was_measured() -> None:
    def at(point: Point, seconds: float) -> Sample:
        return Sample(point=point, seconds=(seconds,))

    samples = [
        *(
            at(GemmPoint(dtype=dtype, rows=rows, d_in=64, d_out=64), 1e-5 + rows * 1e-8)
            for dtype in ("float32", "bfloat16")
            for rows in (8, 16, 32, 64)
        ),
        *(
            all_to_all(size, 1e-4 + size * 1e-9, in_flight=several, ranks=ranks)
            for ranks in (2, 4)
            for several in (1, 4)
            for size in (2**10, 2**14, 2**18)
        ),
        *(
            at(
                CopyPoint(direction="h2d", pinned=pinned, num_bytes=size, both_ways=both),
                1e-5 + size * 1e-10,
            )
            for pinned in (True, False)
            for both in (True, False)
            for size in (2**10, 2**20)
        ),
        at(RowsPoint(op="gelu", dtype="float32", rows=8, width=64), 1e-6),
    ]

    profile = fitted(samples)

    assert [line.dtype for line in profile.gemm] == ["bfloat16", "float32"]
    assert [(line.op, line.group_size, line.in_flight) for line in profile.collective] == [
        ("all_to_all", 2, 1), ("all_to_all", 2, 4), ("all_to_all", 4, 1), ("all_to_all", 4, 4),
    ]  # fmt: skip
    assert {(line.pinned, line.both_ways) for line in profile.copy} == {
        (True, True), (True, False), (False, True), (False, False)
    }  # fmt: skip
    assert profile.samples == tuple(samples)
    assert profile.provenance == "measured"
    assert (profile.name, profile.machine, profile.fingerprint) == ("lab", MACHINE, FINGERPRINT)
    line = profile.collective[0]
    assert line.alpha_seconds == pytest.approx(1e-4)
    assert line.beta_seconds_per_byte == pytest.approx(1e-9)


def test_later_samples_of_a_point_join_the_earlier_samples() -> None:
    apart = fitted([all_to_all(1000, 1.0, 5.0), all_to_all(2000, 8.0), all_to_all(1000, 3.0)])
    joined = fitted([all_to_all(1000, 1.0, 5.0, 3.0), all_to_all(2000, 8.0)])
    assert apart.collective == joined.collective
    assert len(apart.samples) == 3
    estimate = costs_of(apart).seconds(CollectiveKey("all_to_all", 2), 1000)
    assert estimate.seconds == 3.0


def test_a_profile_without_any_time_is_refused_with_the_next_step() -> None:
    point = CollectivePoint(op="all_to_all", group_size=2, num_bytes=4000)
    with pytest.raises(ProfileError, match=r'"lab" has no sample with a time \(1 failed\)') as seen:
        fitted([Sample(point=point, seconds=(), error="rank 1 died")])
    assert "moetune profile --name lab" in seen.value.hint


def test_interference_is_the_time_alone_over_the_time_with_the_others() -> None:
    def sample(victim: str, others: tuple[str, ...], *seconds: float) -> Sample:
        point = InterferencePoint(victim=victim, others=others)  # type: ignore[arg-type]  # texts of the table below
        return Sample(point=point, seconds=seconds)

    profile = fitted(
        [sample("comm", (), 1.0, 1.0, 9.0), sample("comm", ("comp",), 1.25),
         sample("comm", ("comp", "mem"), 2.0), sample("comp", (), 1.0),
         sample("comp", ("comm",), 0.98), sample("mem", ("comp",), 3.0)]
    )  # fmt: skip

    assert profile.interference.comm.comp == pytest.approx(0.8)
    assert profile.interference.comm.all == pytest.approx(0.5)
    assert profile.interference.comm.mem == 1.0
    assert profile.interference.comp.comm == 1.0  # noise cannot make an operation faster
    assert profile.interference.mem.comp == 1.0  # no baseline


def test_same_samples_and_seed_give_the_same_profile_and_order_does_not_matter() -> None:
    samples = noisy(lambda size: 2e-5 + size * 1e-9, [2**at for at in range(10, 20)])
    first = fitted(samples, seed=4)
    assert fitted(samples, seed=4) == first
    assert fitted(samples[::-1], seed=4).collective == first.collective
    assert fitted(samples, seed=5).collective != first.collective


@given(
    st.lists(
        st.tuples(st.integers(0, 2**40), st.lists(st.floats(1e-8, 1e3), min_size=1, max_size=4)),
        min_size=1,
        max_size=12,
    )
)
def test_whatever_was_measured_makes_a_valid_profile(points: list[tuple[int, list[float]]]) -> None:
    profile = fitted([all_to_all(size, *seconds) for size, seconds in points])
    for line in profile.collective:
        assert line.alpha_seconds >= 0
        assert line.beta_seconds_per_byte > 0
    assert profile_from_document(json.loads(canonical_json(profile))) == profile


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


@pytest.mark.parametrize("seed", range(5))
def test_line_recovers_start_up_and_rate_despite_noise_and_stragglers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    times = noisy_times([20e-6 + size * 3e-10 for size in SIZES], rng)
    line = fit_line(sizes=SIZES, seconds=[float(np.median(row)) for row in times])
    assert line.alpha_seconds == pytest.approx(20e-6, rel=0.03)
    assert line.beta_seconds == pytest.approx(3e-10, rel=0.03)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.floats(1e-5, 1e-1)), min_size=3, max_size=12,
             unique_by=lambda pair: pair[0])
)  # fmt: skip
def test_line_misses_no_more_than_scipys_least_squares(points: list[tuple[int, float]]) -> None:
    sizes = np.array([2.0**at for at, _ in points])
    seconds = np.array([time for _, time in points])
    features = np.stack([1 / seconds, sizes / seconds], axis=1)
    line = fit_line(sizes=sizes.tolist(), seconds=seconds.tolist())
    ours = np.linalg.norm(features @ [line.alpha_seconds, line.beta_seconds] - 1)
    least = nnls(features, np.ones(len(points)))[1]
    # A slope must be above 0, so a falling or flat curve misses by a little more.
    assert ours <= least * (1 + 1e-5) + 1e-5


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


def summary(errors: list[float]) -> FitError | None:
    return fit_error(errors=errors, sizes=(1.0, 2.0), times=((2.0,), (3.0,)), seed=0)


def test_a_twentieth_of_the_errors_lies_above_the_95th_percentile() -> None:
    # 0.00, 0.01, … 1.00: of 101 errors the hundredths are the percentiles.
    error = summary([at / 100 for at in range(101)])
    assert error is not None
    assert error.median == pytest.approx(0.50)
    assert error.p95 == pytest.approx(0.95)
    assert (error.num_points, error.low, error.high) == (2, 1.0, 2.0)
    # The line through both points: 1 s, and 1 s for each size.
    assert error.alpha_seconds == pytest.approx((1.0, 1.0))
    assert error.beta_seconds == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize(("usual", "tail", "quality"), [
    (0.05, 0.15, "good"), (0.05, 0.151, "usable"), (0.051, 0.06, "usable"),
    (0.10, 0.30, "usable"), (0.10, 0.301, "suspect"), (0.101, 0.11, "suspect"),
])  # fmt: skip
def test_a_label_needs_the_median_and_the_tail(usual: float, tail: float, quality: str) -> None:
    # Of 101 errors the six largest begin at the 95th percentile; the 90th is still usual.
    error = summary([usual] * 95 + [tail] * 6)
    assert error is not None
    assert error.quality == quality


def test_nothing_left_out_has_no_error() -> None:
    assert summary([]) is None
