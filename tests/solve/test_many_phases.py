"""Phases that are simulated all at once, against each of them simulated alone."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.interference import Interference
from moetune.domain.layer import PHASES, Phase
from moetune.solve.layer.least_seconds import least_seconds
from moetune.solve.layer.many_phases import reused_seconds_of_many, seconds_where_settled
from moetune.solve.layer.phase_arrays import ManyPhases, speeds_of
from moetune.solve.layer.reuse import ReusedChunk
from moetune.solve.layer.steady import reused_seconds
from tests.solve.test_reuse import DISTURBED
from tests.solve.test_steady import CHUNK, chunks, tables

Case = tuple[ReusedChunk, Phase, Interference, int]

cases = st.tuples(
    chunks, st.sampled_from(PHASES), tables, st.sampled_from([1, 2, 3, 7, 11, 12, 40])
)


def together(wanted: list[Case]) -> ManyPhases:
    return ManyPhases(
        kinds=[chunk.kind(phase) for chunk, phase, _, _ in wanted],
        kind=np.arange(len(wanted)),
        degree=np.array([degree for *_, degree in wanted]),
        durations=np.array([chunk.durations for chunk, *_ in wanted]).T,
        speeds=np.array([speeds_of(table) for _, _, table, _ in wanted]).T,
    )


@settings(max_examples=60, deadline=None)
@given(wanted=st.lists(cases, min_size=1, max_size=24))
def test_phases_take_as_long_as_each_one_alone(wanted: list[Case]) -> None:
    alone = [
        reused_seconds(chunk.kind(phase), chunk.durations, degree=degree, interference=table)
        for chunk, phase, table, degree in wanted
    ]
    found = reused_seconds_of_many(together(wanted))
    assert found.tolist() == pytest.approx(alone, rel=1e-11, abs=1e-300)


def _of_a_strategy(chunk: ReusedChunk, phase: Phase) -> ReusedChunk:
    """Return the chunk, sent again only where a strategy does: backward, and in place of a copy."""
    is_one = phase == "backward" and chunk.copy_input is None
    return replace(chunk, sends_again=chunk.sends_again and is_one)


@settings(max_examples=60, deadline=None)
@given(wanted=st.lists(cases, min_size=1, max_size=24))
def test_no_phase_beats_its_bound(wanted: list[Case]) -> None:
    phases = together(
        [
            (_of_a_strategy(chunk, phase), phase, table, degree)
            for chunk, phase, table, degree in wanted
        ]
    )
    least, found = least_seconds(phases), reused_seconds_of_many(phases)
    assert (found >= least * (1 - 1e-9)).all()


@pytest.mark.parametrize("times", [1, 5])
def test_few_phases_and_many_take_as_long_to_the_last_bit(times: int) -> None:
    wanted: list[Case] = [
        (CHUNK, phase, DISTURBED, degree) for phase in PHASES for degree in (3, 12, 40)
    ]
    alone = [
        reused_seconds(chunk.kind(phase), chunk.durations, degree=degree, interference=table)
        for chunk, phase, table, degree in wanted
    ]
    found = seconds_where_settled(together(wanted * times))
    is_known = ~np.isnan(found)
    assert found[is_known].tolist() == np.array(alone * times)[is_known].tolist()
    assert is_known.any()
    assert reused_seconds_of_many(together(wanted * times)).tolist() == pytest.approx(alone * times)


def test_no_phases_take_no_time() -> None:
    one = together([(CHUNK, "forward", Interference(), 4)])
    assert reused_seconds_of_many(one.only(np.array([], int))).tolist() == []


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_durations_that_are_none_are_refused(seconds: float) -> None:
    one = together([(CHUNK, "forward", Interference(), 4)])
    one.durations[1] = seconds
    with pytest.raises(ValueError, match="0 or more seconds"):
        reused_seconds_of_many(one)
