"""The timeline of a phase, against the closed form and an event-by-event simulation."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.domain.constraints import Order
from moetune.domain.interference import CommSpeed, CompSpeed, Interference, MemSpeed
from moetune.solve.layer.degree import makespan
from moetune.solve.layer.timeline import Task, pipeline_tasks, simulate
from tests.solve.costs_by_hand import event_by_event, link_order

seconds = st.floats(min_value=1e-3, max_value=10.0)
speeds = st.floats(min_value=0.05, max_value=1.0)
orders = st.sampled_from(["dispatch_first", "interleaved"])
NONE = Interference()


def _beside(comm_speed: float, comp_speed: float) -> Interference:
    return Interference(comm=CommSpeed(comp=comm_speed), comp=CompSpeed(comm=comp_speed))


def _uniform(degree: int, t_d: float, t_e: float, order: Order) -> list[Task]:
    return pipeline_tasks(
        dispatch_seconds=[t_d] * degree,
        compute_seconds=[t_e] * degree,
        combine_seconds=[t_d] * degree,
        order=order,
    )


@settings(deadline=None)
@given(st.integers(1, 64), seconds, seconds)
def test_timeline_equals_the_closed_form_without_interference(
    degree: int, t_d: float, t_e: float
) -> None:
    found = simulate(_uniform(degree, t_d, t_e, "dispatch_first"), interference=NONE)
    expected = max(2 * degree * t_d, 2 * t_d + degree * t_e)
    assert math.isclose(found.makespan_seconds, expected, rel_tol=1e-9)


@settings(deadline=None)
@given(st.integers(1, 32), seconds, seconds, speeds, speeds, orders)
def test_timeline_equals_the_closed_form_with_interference_in_both_orders(
    degree: int, t_d: float, t_e: float, comm_speed: float, comp_speed: float, order: Order
) -> None:
    interference = _beside(comm_speed, comp_speed)
    found = simulate(_uniform(degree, t_d, t_e, order), interference=interference)
    expected = makespan(
        degree=degree,
        transfer_seconds=t_d,
        compute_seconds=t_e,
        comm_speed=comm_speed,
        comp_speed=comp_speed,
        order=order,
    )
    assert math.isclose(found.makespan_seconds, expected, rel_tol=1e-9)


@settings(deadline=None)
@given(
    st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=9),
    speeds,
    speeds,
    orders,
)
def test_timeline_of_unequal_chunks_equals_an_event_by_event_simulation(
    chunks: list[tuple[float, float, float]], comm_speed: float, comp_speed: float, order: Order
) -> None:
    dispatch, compute, combine = (list(times) for times in zip(*chunks, strict=True))
    tasks = pipeline_tasks(
        dispatch_seconds=dispatch, compute_seconds=compute, combine_seconds=combine, order=order
    )
    found = simulate(tasks, interference=_beside(comm_speed, comp_speed))
    expected = event_by_event(
        dispatch=dispatch,
        compute=compute,
        combine=combine,
        link_order=link_order(len(chunks), order),
        comm_speed=comm_speed,
        comp_speed=comp_speed,
    )
    assert math.isclose(found.makespan_seconds, expected, rel_tol=1e-9)


@settings(deadline=None)
@given(
    st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=9),
    st.floats(0.5, 1.0),
    st.floats(0.5, 1.0),
    st.floats(0.5, 1.0),
)
def test_timeline_is_no_faster_where_operations_disturb_each_other_more(
    chunks: list[tuple[float, float, float]], speed: float, more: float, comp_speed: float
) -> None:
    dispatch, compute, combine = (list(times) for times in zip(*chunks, strict=True))
    tasks = pipeline_tasks(
        dispatch_seconds=dispatch,
        compute_seconds=compute,
        combine_seconds=combine,
        order="dispatch_first",
    )
    undisturbed = simulate(tasks, interference=NONE).makespan_seconds
    disturbed = simulate(tasks, interference=_beside(speed, comp_speed)).makespan_seconds
    assert undisturbed <= disturbed * (1 + 1e-12)
    total = sum(dispatch) + sum(compute) + sum(combine)
    assert disturbed <= total * (1 + 1e-12)  # at half speed each, overlap still loses nothing
    slower = simulate(tasks, interference=_beside(speed * more, comp_speed * more))
    assert disturbed <= slower.makespan_seconds * (1 + 1e-12)


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
    found = simulate(tasks, interference=interference)
    ends = {span.name: span.end_seconds for span in found.spans}
    assert ends == pytest.approx({"copy": 1.0, "a2a": 1.5, "gemm": 2.0})
    assert found.makespan_seconds == pytest.approx(2.0)


def test_two_tasks_of_one_class_on_two_streams_do_not_disturb_each_other() -> None:
    tasks = [Task("out", "mem", "d2h", 2.0), Task("in", "mem", "h2d", 3.0)]
    interference = Interference(mem=MemSpeed(comp=0.1, comm=0.1, all=0.1))
    assert simulate(tasks, interference=interference).makespan_seconds == 3.0


def test_interleaved_link_serves_in_the_order_of_the_paper() -> None:
    timeline = simulate(_uniform(4, 1.0, 1.0, "interleaved"), interference=NONE)
    link = [span for span in timeline.spans if span.stream == "link"]
    names = [span.name for span in sorted(link, key=lambda span: span.start_seconds)]
    served = "dispatch 0,dispatch 1,combine 0,dispatch 2,combine 1,dispatch 3,combine 2,combine 3"
    assert ",".join(names) == served


def test_spans_of_a_stream_follow_each_other_and_wait_for_what_they_need() -> None:
    tasks = _uniform(5, 1.0, 1.7, "interleaved")
    timeline = simulate(tasks, interference=_beside(0.7, 0.9))
    spans = {span.name: span for span in timeline.spans}
    for task in tasks:
        for name in task.after:
            assert spans[task.name].start_seconds >= spans[name].end_seconds
    for stream in ("link", "compute"):
        mine = [span for span in timeline.spans if span.stream == stream]
        for before, after in itertools.pairwise(mine):
            assert after.start_seconds >= before.end_seconds


def test_tasks_of_no_length_end_when_they_start() -> None:
    timeline = simulate(_uniform(3, 0.0, 2.0, "dispatch_first"), interference=NONE)
    assert timeline.makespan_seconds == 6.0
    assert simulate([], interference=NONE).makespan_seconds == 0.0


def test_a_stream_whose_order_contradicts_a_dependency_is_refused() -> None:
    tasks = [
        Task("first", "comm", "link", 1.0, ("experts",)),
        Task("second", "comm", "link", 1.0),
        Task("experts", "comp", "compute", 1.0, ("second",)),
    ]
    with pytest.raises(ValueError, match=r"'first' .*'link' .*'experts'"):
        simulate(tasks, interference=NONE)


def test_a_cycle_is_refused_even_after_other_tasks_ran() -> None:
    tasks = [
        Task("start", "comp", "compute", 1.0),
        Task("a", "comm", "link", 1.0, ("start", "b")),
        Task("b", "comp", "compute", 1.0, ("a",)),
    ]
    with pytest.raises(ValueError, match=r"'a' .*'link' .*'b'"):
        simulate(tasks, interference=NONE)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([Task("a", "comp", "s", 1.0), Task("a", "comm", "t", 1.0)], "the same name"),
        ([Task("a", "comp", "s", 1.0, ("b",))], "unknown task 'b'"),
        ([Task("a", "comp", "s", -1.0)], "0 or more seconds, got -1.0"),
        ([Task("a", "comp", "s", math.nan)], "0 or more seconds, got nan"),
        ([Task("a", "comp", "s", math.inf)], "0 or more seconds, got inf"),
    ],
)
def test_malformed_tasks_are_refused(tasks: list[Task], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(tasks, interference=NONE)


@pytest.mark.parametrize("compute", [[], [1.0], [1.0, 1.0, 1.0]])
def test_a_pipeline_needs_one_entry_for_each_chunk(compute: list[float]) -> None:
    dispatch = [1.0] * (2 if compute else 0)
    with pytest.raises(ValueError, match="one entry for each chunk"):
        pipeline_tasks(
            dispatch_seconds=dispatch,
            compute_seconds=compute,
            combine_seconds=dispatch,
            order="dispatch_first",
        )


@pytest.mark.parametrize(
    "lengths", [(0, 0, 0), (1, 2, 2), (3, 2, 2), (2, 1, 2), (2, 3, 2), (2, 2, 1), (2, 2, 3)]
)
def test_a_phase_has_one_entry_of_each_kind_a_chunk(lengths: tuple[int, int, int]) -> None:
    dispatch, compute, combine = ([1.0] * length for length in lengths)
    with pytest.raises(ValueError, match="one entry"):
        pipeline_tasks(
            dispatch_seconds=dispatch, compute_seconds=compute, combine_seconds=combine,
            order="dispatch_first",
        )  # fmt: skip
