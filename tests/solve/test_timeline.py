"""The makespan and the timeline of a phase, against an event-by-event simulation."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.constraints import Order
from moetune.domain.interference import CommSpeed, CompSpeed, Interference, MemSpeed
from moetune.fit.interference import speeds_of
from moetune.solve.layer.degree import makespan
from moetune.solve.layer.timeline import Task, pipeline_tasks, simulate
from tests.solve.costs_by_hand import event_by_event, link_order

seconds = st.floats(min_value=1e-6, max_value=10.0)
speeds = st.floats(min_value=0.05, max_value=1.0)
orders = st.sampled_from(["dispatch_first", "interleaved"])
NONE = speeds_of(Interference())


def _uniform(degree: int, t_d: float, t_e: float, order: Order) -> list[Task]:
    return pipeline_tasks(
        dispatch_seconds=[t_d] * degree,
        compute_seconds=[t_e] * degree,
        combine_seconds=[t_d] * degree,
        order=order,
    )


@settings(deadline=None)
@given(
    st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=9), speeds, speeds, orders
)
def test_timeline_of_unequal_chunks_equals_an_event_by_event_simulation(
    chunks: list[tuple[float, float, float]], comm_speed: float, comp_speed: float, order: Order
) -> None:
    dispatch, compute, combine = (list(times) for times in zip(*chunks, strict=True))
    tasks = pipeline_tasks(
        dispatch_seconds=dispatch, compute_seconds=compute, combine_seconds=combine, order=order
    )
    slowed = Interference(comm=CommSpeed(comp=comm_speed), comp=CompSpeed(comm=comp_speed))
    timeline = simulate(tasks, speeds=speeds_of(slowed))
    expected = event_by_event(
        dispatch=dispatch,
        compute=compute,
        combine=combine,
        link_order=link_order(len(chunks), order),
        comm_speed=comm_speed,
        comp_speed=comp_speed,
    )
    assert math.isclose(timeline.makespan_seconds, expected, rel_tol=1e-9)


def test_three_classes_slow_each_other_down_by_the_set_that_runs() -> None:
    interference = Interference(
        comp=CompSpeed(comm=0.5, mem=1.0, all=0.25),
        comm=CommSpeed(comp=0.8, mem=0.5, all=0.4),
        mem=MemSpeed(comp=1.0, comm=0.5, all=0.5),
    )
    tasks = [
        Task("gemm", "comp", "compute", 1.0),
        Task("a2a", "comm", "link", 0.8),
        Task("copy", "mem", "copies", 0.5),
    ]
    # All three run until the copy ends at 0.5 / 0.5 = 1 s: then 0.75 of the GEMM and 0.4 of the
    # transfer are left. At 0.5 and 0.8 the transfer ends 0.5 s later, and of the GEMM 0.5 is
    # left, which takes 0.5 s alone.
    timeline = simulate(tasks, speeds=speeds_of(interference))
    ends = {span.name: span.end_seconds for span in timeline.spans}
    assert ends == pytest.approx({"copy": 1.0, "a2a": 1.5, "gemm": 2.0})
    assert timeline.makespan_seconds == pytest.approx(2.0)


def test_interleaved_link_serves_in_the_order_of_the_paper() -> None:
    timeline = simulate(_uniform(4, 1.0, 1.0, "interleaved"), speeds=NONE)
    link = [span for span in timeline.spans if span.stream == "link"]
    names = [span.name for span in sorted(link, key=lambda span: span.start_seconds)]
    served = "dispatch 0,dispatch 1,combine 0,dispatch 2,combine 1,dispatch 3,combine 2,combine 3"
    assert ",".join(names) == served


def test_a_stream_whose_order_contradicts_a_dependency_is_refused() -> None:
    tasks = [
        Task("first", "comm", "link", 1.0, ("experts",)),
        Task("second", "comm", "link", 1.0),
        Task("experts", "comp", "compute", 1.0, ("second",)),
    ]
    with pytest.raises(AssertionError, match="wait for each other"):
        simulate(tasks, speeds=NONE)


@settings(deadline=None)
@given(
    st.integers(1, 16),
    seconds,
    st.floats(0.05, 20.0),
    speeds,
    speeds,
    st.sampled_from(["dispatch_first", "interleaved"]),
)
def test_makespan_equals_an_event_by_event_simulation_where_operations_disturb_each_other(
    degree: int, t_d: float, ratio: float, comm_speed: float, comp_speed: float, order: str
) -> None:
    expected = event_by_event(
        dispatch=[t_d] * degree,
        compute=[t_d * ratio] * degree,
        combine=[t_d] * degree,
        link_order=link_order(degree, order),
        comm_speed=comm_speed,
        comp_speed=comp_speed,
    )
    taken = makespan(
        degree=degree,
        transfer_seconds=t_d,
        compute_seconds=t_d * ratio,
        comm_speed=comm_speed,
        comp_speed=comp_speed,
        order="interleaved" if order == "interleaved" else "dispatch_first",
    )
    assert math.isclose(taken, expected, rel_tol=1e-9)


@settings(deadline=None)
@given(st.integers(2, 64), seconds, st.floats(0.01, 10.0))
def test_interleaving_is_slower_exactly_between_one_and_two_transfers(
    degree: int, t_d: float, ratio: float
) -> None:
    t_e = t_d * ratio
    first = makespan(degree=degree, transfer_seconds=t_d, compute_seconds=t_e)
    turns = makespan(degree=degree, transfer_seconds=t_d, compute_seconds=t_e, order="interleaved")
    assert turns >= first * (1 - 1e-12)
    if degree > 2 and 1.01 < ratio < 1.99:
        assert turns > first * (1 + 1e-6)
        assert turns < first * 1.13
    elif not 1 < ratio < 2 or degree == 2:
        assert math.isclose(turns, first, rel_tol=1e-12)
