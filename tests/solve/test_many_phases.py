"""Phases that are simulated all at once, against simulations of all chunks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.interference import Interference
from moetune.domain.layer import PHASES, Phase
from moetune.solve.layer.many_phases import reused_seconds
from moetune.solve.layer.phase_arrays import ManyPhases, speeds_of
from moetune.solve.layer.reuse import ReusedChunk
from tests.solve.test_reuse import DISTURBED
from tests.solve.test_steady import CHUNK, all_chunks, alone, chunks, tables

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
def test_phases_take_as_long_as_all_their_chunks(wanted: list[Case]) -> None:
    each = [all_chunks(chunk, phase, degree, table) for chunk, phase, table, degree in wanted]
    found = reused_seconds(together(wanted))
    assert found.tolist() == pytest.approx(each, rel=1e-11, abs=1e-300)


@pytest.mark.parametrize("times", [1, 5])
def test_few_phases_and_many_take_as_long_to_the_last_bit(times: int) -> None:
    wanted: list[Case] = [
        (CHUNK, phase, DISTURBED, degree) for phase in PHASES for degree in (3, 12, 40)
    ]
    each = [alone(chunk, phase, degree, table) for chunk, phase, table, degree in wanted]
    assert reused_seconds(together(wanted * times)).tolist() == each * times


def test_no_phases_take_no_time() -> None:
    one = together([(CHUNK, "forward", Interference(), 4)])
    assert reused_seconds(one.only(np.array([], int))).tolist() == []


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_durations_that_are_none_are_refused(seconds: float) -> None:
    one = together([(CHUNK, "forward", Interference(), 4)])
    one.durations[1] = seconds
    with pytest.raises(ValueError, match="0 or more seconds"):
        reused_seconds(one)
