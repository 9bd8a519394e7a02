"""Bursts of links, from streams of a token bucket that is worked out by hand."""

import pytest

from moetune.domain.errors import InputError
from moetune.domain.profile import LinkBurst
from moetune.domain.samples import BurstPoint, CollectivePoint, Sample
from moetune.fit.bursts import bursts_of
from moetune.fit.pool import pool

BYTES, RATE = 2**20, 25e6
STEADY_SECONDS = BYTES / RATE
STEADY = CollectivePoint(op="all_to_all", group_size=2, num_bytes=BYTES, in_flight=4)
FROM_REST = BurstPoint(op="all_to_all", group_size=2, num_bytes=BYTES, in_flight=4)


def streams(bucket_bytes: float, *lengths: int) -> list[Sample]:
    """Return streams of so many exchanges that begin with a full bucket, one a visit."""
    return [
        Sample(
            point=FROM_REST,
            seconds=((length * BYTES - bucket_bytes) / RATE / length,) * 3,
            num_iterations=length,
        )
        for length in lengths
    ]


def steady() -> list[Sample]:
    return [Sample(point=STEADY, seconds=(STEADY_SECONDS,) * 4, num_iterations=4)]


@pytest.mark.parametrize("lengths", [(4,), (4, 4, 4), (4, 8), (16, 4, 8)])
def test_a_burst_is_the_time_that_a_buckets_bytes_take_at_the_rate(
    lengths: tuple[int, ...],
) -> None:
    samples = [*steady(), *streams(2**18, *lengths)]
    (found,) = bursts_of(samples, pool(samples).collective)
    assert (found.op, found.group_size, found.num_nodes) == ("all_to_all", 2, 0)
    assert found.seconds == pytest.approx(2**18 / RATE)


@pytest.mark.parametrize("bucket_bytes", [0.0, 0.02 * 4 * BYTES, -(2.0**18)])
def test_streams_that_are_no_faster_or_hardly_have_no_burst(bucket_bytes: float) -> None:
    samples = [*steady(), *streams(bucket_bytes, 4)]
    assert bursts_of(samples, pool(samples).collective) == ()


def test_a_stream_from_rest_at_a_higher_rate_says_by_which_share() -> None:
    samples = [
        *steady(),
        Sample(point=FROM_REST, seconds=(0.8 * BYTES / RATE,) * 3, num_iterations=4),
    ]
    (found,) = bursts_of(samples, pool(samples).collective)
    assert found.share == pytest.approx(0.2)


@pytest.mark.parametrize("share", [0.0, 1.0, float("nan")])
def test_a_share_of_nothing_or_all_is_refused(share: float) -> None:
    with pytest.raises(InputError, match="share"):
        LinkBurst(op="all_to_all", group_size=2, seconds=1e-3, share=share)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_burst_of_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(InputError, match="burst"):
        LinkBurst(op="all_to_all", group_size=2, seconds=seconds)


def test_a_stream_from_rest_runs_the_collectives_of_the_one_further_on() -> None:
    assert FROM_REST.collective == STEADY


def test_a_stream_without_the_times_further_on_tells_nothing() -> None:
    samples = [*streams(2**18, 4), Sample(point=FROM_REST, seconds=(), error="out of memory")]
    assert bursts_of(samples, pool(samples).collective) == ()
