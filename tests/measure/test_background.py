"""The proof that operations ran beside the measured one."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.samples import InterferencePoint
from moetune.measure.background import Background, overlap, proves
from moetune.measure.device import Device
from moetune.measure.estimate import representatives
from moetune.measure.operations import Bench, Experiment, local_operation, prepare_experiment
from moetune.measure.ranks import MeasuringRanks
from moetune.measure.timing import Effort, FailedPointError, measure

INTERVALS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 10)).map(lambda pair: (pair[0], sum(pair))),
    max_size=12,
)
WINDOWS = st.tuples(st.integers(0, 30), st.integers(1, 20)).map(lambda pair: (pair[0], sum(pair)))


@given(WINDOWS, INTERVALS)
def test_overlap_counts_moments_once(window: tuple[int, int], busy: list[tuple[int, int]]) -> None:
    moments = range(*window)
    covered = sum(any(low <= moment < high for low, high in busy) for moment in moments)
    assert overlap(window, busy) == pytest.approx(covered / len(moments))


@given(WINDOWS, INTERVALS)
def test_nothing_is_proven_by_work_that_ended_with_the_window(
    window: tuple[int, int], busy: list[tuple[int, int]]
) -> None:
    assert not proves(window, [(low, min(high, window[1])) for low, high in busy])


@given(WINDOWS, st.integers(1, 5))
def test_work_without_a_pause_that_goes_on_is_a_proof(window: tuple[int, int], length: int) -> None:
    start, end = window
    steps = range(start - length, end + length, length)
    busy = [(float(low), float(low + length)) for low in steps]
    inside = any(start < high <= end for _, high in busy)
    assert proves(window, busy) == inside


def short_sleep() -> None:
    time.sleep(2e-3)


def test_a_block_counts_while_the_aggressor_runs_and_no_more_once_it_stopped() -> None:
    with Background(
        [local_operation(short_sleep)], device=Device(), ranks=MeasuringRanks()
    ) as background:
        proven = False
        for _ in range(50):  # a loaded machine may delay the thread in some of the windows
            opened = time.perf_counter()
            time.sleep(0.05)
            proven = proven or background.ran_through((opened, time.perf_counter()))
        assert proven
        opened = time.perf_counter()
        time.sleep(0.05)
        background._loads[0].stop()
        background._loads[0].join()
        time.sleep(0.05)
        assert not background.ran_through((opened, time.perf_counter()))


def test_a_point_whose_aggressor_stops_by_itself_fails() -> None:
    calls = iter(range(20))

    def run_out() -> None:
        short_sleep()
        if next(calls, None) is None:
            raise RuntimeError("the wire is gone")

    scene = Experiment(
        victim=local_operation(short_sleep), background_loads=(local_operation(run_out),)
    )
    effort = Effort(min_blocks=50, max_blocks=90, max_seconds=0.5, warmup_seconds=0.1)
    with pytest.raises(FailedPointError, match="the wire is gone"):
        measure(scene, device=Device(), ranks=MeasuringRanks(), effort=effort)


def test_an_operation_that_waits_for_its_load_to_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's copy engine serves one stream for as long as there is work in it."""
    monkeypatch.setattr("moetune.measure.background._LONGEST_BLOCK_SECONDS", 0.2)
    served = threading.Lock()

    def wait_for_the_engine() -> None:
        with served:
            short_sleep()

    def keep_the_engine() -> None:
        if not served.locked():
            served.acquire()
        short_sleep()

    scene = Experiment(
        victim=local_operation(wait_for_the_engine),
        background_loads=(local_operation(keep_the_engine),),
    )

    class Releasing(Device):
        """The engine is free when the load's stream has no more work."""

        def synchronize(self) -> None:
            if threading.current_thread() is not threading.main_thread():
                served.release()

    effort = Effort(min_blocks=3, max_blocks=9, max_seconds=0.1, warmup_seconds=0.1)
    with pytest.raises(FailedPointError, match="ran through only 0"):
        measure(scene, device=Releasing(), ranks=MeasuringRanks(), effort=effort)


def test_the_thread_that_measures_has_its_stream_before_a_load_runs() -> None:
    """On an H200 a stream that was made beside a load never began."""
    runs: list[float] = []

    def run() -> None:
        runs.append(time.perf_counter())
        short_sleep()

    class Watched(Device):
        def use(self) -> AbstractContextManager[object]:
            assert threading.current_thread() is not threading.main_thread() or not runs
            return super().use()

    scene = Experiment(
        victim=local_operation(short_sleep), background_loads=(local_operation(run),)
    )
    effort = Effort(min_blocks=3, max_blocks=9, max_seconds=0.1, warmup_seconds=0.1)
    measure(scene, device=Watched(), ranks=MeasuringRanks(), effort=effort)
    assert runs


def test_copies_of_two_streams_are_issued_one_by_one() -> None:
    """No copy waits in a queue: the engine is free for another stream between any two."""
    queued, most = 0, 0

    class Counting(Device):
        def mark(self) -> Callable[[], float]:
            nonlocal queued, most
            queued += 1
            most = max(most, queued)

            def done() -> float:
                nonlocal queued
                queued -= 1
                return time.perf_counter()

            return done

    device, ranks = Counting(), MeasuringRanks()
    effort = Effort(min_blocks=3, max_blocks=9, max_seconds=0.2, warmup_seconds=0.1)
    for others, longest in ((("comp",), 2), (("mem",), 1)):
        queued, most = 0, 0
        point = InterferencePoint(victim="comp", others=others)  # type: ignore[arg-type]  # names
        scene = prepare_experiment(
            point, Bench(device=device, ranks=ranks, representatives=representatives(device, 1))
        )
        measure(scene, device=device, ranks=ranks, effort=effort)
        assert most == longest
