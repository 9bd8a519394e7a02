"""Phases that are simulated all at once, until their chunks are alike, against all their chunks."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.costs import Estimate
from moetune.domain.interference import CommSpeed, CompSpeed, Interference, MemSpeed
from moetune.domain.layer import PHASES, Phase
from moetune.solve.layer.reuse import ReusedChunk, reuse_tasks
from moetune.solve.layer.reuse_times import ReusedPhases, reused_seconds
from moetune.solve.layer.timeline import simulate

Case = tuple[ReusedChunk, Phase, Interference, int]

speeds = st.sampled_from([1.0, 0.93, 0.71, 0.4])
tables = st.builds(
    lambda one, two, three: Interference(
        comp=CompSpeed(comm=one[0], mem=one[1], all=one[2]),
        comm=CommSpeed(comp=two[0], mem=two[1], all=two[2]),
        mem=MemSpeed(comp=three[0], comm=three[1], all=three[2]),
    ),
    *[st.tuples(speeds, speeds, speeds)] * 3,
)
estimates = st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(1e-6, 3.0)).map(
    lambda seconds: Estimate(seconds=seconds, trust="measured")
)
chunks = st.builds(
    ReusedChunk, transfer=estimates, before=estimates, after=estimates,
    copy_input=st.none() | estimates, copy_middle=st.none() | estimates,
    sends_again=st.booleans(), copies_overlap=st.booleans(), sorts_rows=st.booleans(),
)  # fmt: skip
cases = st.tuples(
    chunks, st.sampled_from(PHASES), tables,
    st.sampled_from([1, 2, 3, 7, 10, 11, 12, 13, 25, 40, 64]),
)  # fmt: skip
CHUNK = ReusedChunk(
    transfer=Estimate(seconds=1.0, trust="measured"),
    before=Estimate(seconds=0.7, trust="measured"),
    after=Estimate(seconds=0.4, trust="measured"),
    copy_input=None, copy_middle=None, sends_again=False, copies_overlap=True, sorts_rows=False,
)  # fmt: skip


def together(wanted: list[Case]) -> list[float]:
    phases = [
        ReusedPhases(chunk, phase, np.array([degree]), table)
        for chunk, phase, table, degree in wanted
    ]
    return [float(found[0]) for found in reused_seconds(phases)]


def all_chunks(chunk: ReusedChunk, phase: Phase, table: Interference, degree: int) -> float:
    tasks = reuse_tasks(chunk=chunk, phase=phase, degree=degree)
    return simulate(tasks, interference=table).makespan_seconds


@settings(max_examples=80, deadline=None)
@given(wanted=st.lists(cases, min_size=1, max_size=24))
def test_phases_take_as_long_as_all_their_chunks(wanted: list[Case]) -> None:
    each = [all_chunks(*case) for case in wanted]
    assert together(wanted) == pytest.approx(each, rel=1e-11, abs=1e-300)


@pytest.mark.parametrize(
    ("phase", "seconds"),
    [("backward", (2.75, 0.5, 1.75, 2.25, 2.75)), ("forward", (1.75, 0.75, 0.75, None, 2.5))],
)
def test_streams_that_take_turns_over_several_chunks_run_to_the_end(
    phase: Phase, seconds: tuple[float | None, ...]
) -> None:
    """Nothing is as it was one chunk before, where two chunks take turns."""
    parts = [None if one is None else Estimate(seconds=one, trust="measured") for one in seconds]
    transfer, before, after, copy_input, copy_middle = parts
    assert transfer
    assert before
    assert after
    chunk = replace(
        CHUNK, transfer=transfer, before=before, after=after, copy_input=copy_input,
        copy_middle=copy_middle,
    )  # fmt: skip
    for degree in (5, 12, 40, 64):
        case = chunk, phase, Interference(), degree
        assert together([case]) == pytest.approx([all_chunks(*case)], rel=1e-11)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_durations_that_are_none_are_refused(seconds: float) -> None:
    absurd = replace(CHUNK, after=Estimate(seconds=seconds, trust="measured"))
    with pytest.raises(ArithmeticError, match="negative"):
        together([(absurd, "forward", Interference(), 2)])
