"""Detection of drift: quiet in noise, and quick to name a change and its first step."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from moetune.fit.drift import NUM_FIRST, NUM_SKIPPED, WATCH_EVERY, Drift, DriftDetector

STEPS = 10_000
SECONDS = 0.02
FIRST = (NUM_FIRST + NUM_SKIPPED) * WATCH_EVERY


def drifts(times: Iterable[tuple[int, float]]) -> tuple[Drift, ...]:
    detector = DriftDetector()
    return tuple(filter(None, (detector.add(step, seconds) for step, seconds in times)))


def noisy(seed: int, num: int) -> np.ndarray:
    """Return times with 5 % jitter, of which 5 % are stragglers of 2 to 5 times."""
    rng = np.random.default_rng(seed)
    times = SECONDS * np.exp(rng.normal(0.0, 0.05, num))
    return np.where(rng.random(num) < 0.05, times * rng.uniform(2.0, 5.0, num), times)


def watched(times: Sequence[float] | np.ndarray) -> list[tuple[int, float]]:
    return [(step, float(times[step])) for step in range(0, len(times), WATCH_EVERY)]


def test_noise_and_stragglers_raise_at_most_one_alarm_in_a_hundred_runs() -> None:
    alarms = sum(bool(drifts(watched(noisy(seed, STEPS)))) for seed in range(100))
    assert alarms <= 1


@pytest.mark.parametrize("factor", [0.5, 0.7, 1.3, 1.6, 3.0])
def test_a_change_is_seen_within_fifty_steps_with_its_size_and_its_beginning(factor: float) -> None:
    late, early, wrong, runs = 0, 0, 0, 60
    for seed in range(runs):
        change = 3 * FIRST + seed
        times = noisy(seed, 6 * FIRST)
        times[change:] *= factor
        drift, *_ = drifts(watched(times))
        late += drift.seen_step > change + 50
        early += abs(drift.since_step - change) > 2 * WATCH_EVERY
        wrong += abs(math.log(drift.factor / factor)) > 0.1
    assert late <= (1 if factor > 1 else runs // 10)
    assert early <= (1 if factor > 1 else runs // 4)
    assert wrong <= runs // 20


def test_a_change_back_is_a_second_alarm_and_a_time_that_stays_raises_no_more() -> None:
    times = [SECONDS] * 4 * FIRST
    times[2 * FIRST :] = [2 * SECONDS] * 2 * FIRST
    times[3 * FIRST :] = [SECONDS] * FIRST
    slower, faster = drifts(watched(times))
    assert (slower.since_step, faster.since_step) == (2 * FIRST, 3 * FIRST)
    assert (slower.factor, faster.factor) == pytest.approx((2.0, 0.5))


def test_steps_that_warm_up_are_not_compared_with() -> None:
    first = [SECONDS * (1 + number / 1000) for number in range(NUM_FIRST)]
    times = [SECONDS / 2] * NUM_SKIPPED + first + [3 * SECONDS] * NUM_FIRST
    drift, *_ = drifts(enumerate(times))
    assert drift.before_seconds == pytest.approx(math.exp(np.median(np.log(first))), rel=1e-9)
    assert drift.since_step == NUM_SKIPPED + NUM_FIRST


def test_one_long_step_is_no_change_however_long() -> None:
    times = [SECONDS] * 3 * FIRST
    times[2 * FIRST] = 1e6
    assert drifts(watched(times)) == ()
