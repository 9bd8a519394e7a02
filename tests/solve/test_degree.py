"""The makespan of chunks in closed form, against an event-by-event simulation."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from moetune.solve.layer.degree import makespan
from tests.solve.costs_by_hand import event_by_event, link_order

seconds = st.floats(min_value=1e-6, max_value=10.0)
speeds = st.floats(min_value=0.05, max_value=1.0)


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
    found = makespan(
        degree=degree,
        transfer_seconds=t_d,
        compute_seconds=t_d * ratio,
        comm_speed=comm_speed,
        comp_speed=comp_speed,
        order="interleaved" if order == "interleaved" else "dispatch_first",
    )
    assert math.isclose(found, expected, rel_tol=1e-9)


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
