"""What the alarm thinks of a store's observations: the same changes, with their band and sums."""

from dataclasses import replace

import numpy as np
import pytest

from moetune.domain.operations import Operation, OperationTimes
from moetune.domain.records import Observation, Stored
from moetune.fit.drift import LIMIT, MIN_SPREAD, NUM_FIRST, NUM_SKIPPED, drifts, watch
from moetune.workflows.alarm import watched_series
from moetune.workflows.views.alarm import alarm_section

FIRST = NUM_FIRST + NUM_SKIPPED


def rows(seconds: list[float], *, plan: str = "a" * 64) -> list[Stored[Observation]]:
    """Return observations of one step each, whose forward all_to_all takes a tenth of it."""
    operation = Operation(name="all_to_all", phase="forward", size=2**20, degree=2)
    return [
        Stored(
            id=at + 1,
            created_at=f"2026-11-20T{at // 60:02}:{at % 60:02}:00.000000+00:00",
            value=Observation(
                plan_id=plan, forward_degree=2, backward_degree=2, tokens_per_rank=1024,
                predicted_seconds=0.01, seconds=(one,), source="training",
                operations=(
                    OperationTimes(
                        operation=operation, predicted_seconds=None, seconds=(one / 10,)
                    ),
                ),
            ),
        )
        for at, one in enumerate(seconds)
    ]  # fmt: skip


def test_watching_sees_the_alarms_of_the_detector_and_the_sums_that_lead_to_them() -> None:
    rng = np.random.default_rng(0)
    times = [*(0.01 * np.exp(rng.normal(0, 0.03, 60))), *(0.014 * np.exp(rng.normal(0, 0.03, 60)))]
    series = [(at, float(one)) for at, one in enumerate(times)]
    states = watch(series)
    assert tuple(one.drift for one in states if one.drift is not None) == drifts(series)
    (alarm,) = [one for one in states if one.drift is not None]
    assert alarm.longer == LIMIT
    assert all(0 <= max(one.longer, one.shorter) <= LIMIT for one in states)
    assert all(one.band_seconds is None for one in states[:FIRST])
    first = states[FIRST]
    assert first.before_seconds == pytest.approx(np.median(times[NUM_SKIPPED:FIRST]), rel=0.02)
    assert first.band_seconds is not None
    low, high = first.band_seconds
    assert low * high == pytest.approx((first.before_seconds or 0) ** 2)
    assert high / (first.before_seconds or 1) >= np.exp(1.5 * MIN_SPREAD) * (1 - 1e-9)
    # Beyond the band times add up, within it the sums only fall.
    for before, one in zip(states[FIRST:], states[FIRST + 1 :], strict=False):
        if one.band_seconds and one.band_seconds[0] <= one.seconds <= one.band_seconds[1]:
            assert one.longer <= before.longer or before.drift is not None


def test_steps_and_operations_of_a_plan_are_series_in_order_and_in_sentences() -> None:
    series = watched_series(rows([0.01] * 40 + [0.02] * 40))
    assert [one.phase for one in series] == ["step", "forward"]
    step, forward = series
    assert len(step.states) == len(forward.states) == 80
    assert "taken longer since 2026-11-20 00:40 UTC: 20.0 ms, 2.00 × the 10.0 ms" in step.words
    assert "all_to_all of 1.00 MiB (forward, 2 chunks)" in forward.words
    assert "is unchanged" in watched_series(rows([0.01] * 40))[0].words
    assert "beginning to look changed" in watched_series(rows([0.01] * 40 + [0.02] * 4))[0].words
    assert "10 of the 18 times" in watched_series(rows([0.01] * 10))[0].words
    certain = watched_series(rows([0.01] * 40 + [0.02] * 6))[0].words
    assert certain.endswith("before")
    learning = watched_series(rows([0.01] * 40 + [0.02] * 10))[0].words
    assert learning.endswith("are known since")


def test_one_plan_has_sentences_and_several_are_listed() -> None:
    one = alarm_section(watched_series(rows([0.01] * 40 + [0.02] * 40)))
    assert len(one.paragraphs) == len(one.tables[0].rows) == 2
    assert [row[-1].text for row in one.tables[0].rows] == ["changed to 2.00 ×"] * 2
    both = [*rows([0.01] * 30), *rows([0.01] * 30, plan="b" * 64)]
    several = alarm_section(watched_series(both))
    assert several.paragraphs == ()
    assert len(several.tables[0].rows) == 4


def test_rows_with_times_that_no_step_takes_are_left_out() -> None:
    sound = rows([0.01] * 3)
    strange = replace(sound[0], value=replace(sound[0].value, seconds=(1e308,)))
    assert len(watched_series([strange, *sound[1:]])[0].states) == 2
