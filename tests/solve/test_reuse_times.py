"""Phases that are simulated all at once, until their chunks are alike, against all their chunks."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.costs import Estimate
from moetune.domain.interference import CommSpeed, CompSpeed, Interference, MemSpeed
from moetune.domain.layer import PHASES, Phase
from moetune.fit.interference import speeds_of
from moetune.solve.layer.operations import Price
from moetune.solve.layer.reuse import ChunkPattern, ReusedChunk, reuse_tasks, reused_seconds
from moetune.solve.layer.timeline import simulate


def price(seconds: float | list[float]) -> Price:
    return Estimate(seconds=np.array(seconds), trust="measured")


speeds = st.sampled_from([1.0, 0.93, 0.71, 0.4])
tables = st.builds(
    lambda comp, comm, mem: Interference(
        comp=CompSpeed(comm=comp[0], mem=comp[1], all=comp[2]),
        comm=CommSpeed(comp=comm[0], mem=comm[1], all=comm[2]),
        mem=MemSpeed(comp=mem[0], comm=mem[1], all=mem[2]),
    ),
    *[st.tuples(speeds, speeds, speeds)] * 3,
)
estimates = st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(1e-6, 3.0)).map(price)
chunks = st.builds(
    ReusedChunk, pattern=st.builds(ChunkPattern, *[st.booleans()] * 5), transfer=estimates,
    before=estimates, after=estimates, copy_input=estimates, copy_middle=estimates,
)  # fmt: skip
degrees = st.lists(
    st.sampled_from([1, 2, 3, 7, 10, 11, 12, 13, 25, 40, 64]), min_size=1, max_size=11, unique=True
)
PATTERN = ChunkPattern(
    copies_input=False, copies_middle=False, sends_again=False, copies_overlap=True,
    sorts_rows=False,
)  # fmt: skip
CHUNK = ReusedChunk(pattern=PATTERN, transfer=price(1.0), before=price(0.7), after=price(0.4))


def assert_ends(chunk: ReusedChunk, phase: Phase, table: Interference, degrees: list[int]) -> None:
    speeds = speeds_of(table)
    at_once = reused_seconds(chunk=chunk, phase=phase, degrees=np.array(degrees), speeds=speeds)
    each = [
        simulate(
            reuse_tasks(chunk=chunk, phase=phase, degree=degree), speeds=speeds
        ).makespan_seconds
        for degree in degrees
    ]
    assert at_once == pytest.approx(each, rel=1e-11, abs=1e-300)


@settings(max_examples=60, deadline=None)
@given(chunk=chunks, phase=st.sampled_from(PHASES), table=tables, degrees=degrees)
def test_phases_take_as_long_as_all_their_chunks(
    chunk: ReusedChunk, phase: Phase, table: Interference, degrees: list[int]
) -> None:
    assert_ends(chunk, phase, table, degrees)


def test_a_phase_of_many_refits_takes_as_long_as_under_each() -> None:
    seconds_of_refits, speed_of_refits = [0.2, 1.0, 1.3], [0.5, 0.9, 1.0]
    table = {**speeds_of(Interference()), ("comp", "comm"): np.array(speed_of_refits)}
    at_once = reused_seconds(
        chunk=replace(CHUNK, transfer=price(seconds_of_refits)), phase="forward",
        degrees=np.full(3, 12), speeds=table,
    )  # fmt: skip
    for seconds, speed, makespan in zip(seconds_of_refits, speed_of_refits, at_once, strict=True):
        chunk = replace(CHUNK, transfer=price(seconds))
        tasks = reuse_tasks(chunk=chunk, phase="forward", degree=12)
        slowed = speeds_of(Interference(comp=CompSpeed(comm=speed)))
        assert makespan == pytest.approx(simulate(tasks, speeds=slowed).makespan_seconds)


@pytest.mark.parametrize(
    ("phase", "seconds"),
    [("backward", (2.75, 0.5, 1.75, 2.25, 2.75)), ("forward", (1.75, 0.75, 0.75, 0.0, 2.5))],
)
def test_streams_that_take_turns_over_several_chunks_run_to_the_end(
    phase: Phase, seconds: tuple[float, ...]
) -> None:
    """Nothing is as it was one chunk before, where two chunks take turns."""
    transfer, before, after, copy_input, copy_middle = map(price, seconds)
    chunk = ReusedChunk(
        pattern=PATTERN._replace(copies_input=seconds[3] > 0, copies_middle=True),
        transfer=transfer, before=before, after=after, copy_input=copy_input,
        copy_middle=copy_middle,
    )  # fmt: skip
    assert_ends(chunk, phase, Interference(), [5, 12, 40, 64])


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_durations_that_are_none_are_refused(seconds: float) -> None:
    absurd = replace(CHUNK, after=price(seconds))
    with pytest.raises(ArithmeticError, match="negative"):
        reused_seconds(
            chunk=absurd, phase="forward", degrees=np.array([2]), speeds=speeds_of(Interference())
        )
