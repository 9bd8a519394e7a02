"""The makespan of chunks in closed form, against an event-by-event simulation."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.best_degree import best_degree
from moetune.domain.costs import LinearCost
from moetune.solve.layer.degree import makespan
from tests.solve.costs_by_hand import event_by_event, link_order

seconds = st.floats(min_value=1e-6, max_value=10.0)
speeds = st.floats(min_value=0.05, max_value=1.0)
alphas = st.one_of(st.just(0.0), st.floats(min_value=1e-9, max_value=10.0))
betas = st.one_of(st.just(0.0), st.floats(min_value=1e-18, max_value=1e-3))
sizes = st.floats(min_value=1.0, max_value=1e16)


def _times(
    transfer: LinearCost, payload: float, compute: LinearCost, macs: float, max_degree: int
) -> list[float]:
    """Return T(1..max_degree), as design note and paper write it."""
    found = []
    for r in range(1, max_degree + 1):
        t_d = transfer.alpha_seconds + transfer.beta_seconds * payload / r
        t_e = compute.alpha_seconds + compute.beta_seconds * macs / r
        found.append(max(2 * r * t_d, 2 * t_d + r * t_e))
    return found


@settings(deadline=None)
@given(st.integers(1, 24), seconds, seconds, st.sampled_from(["dispatch_first", "interleaved"]))
def test_makespan_equals_an_event_by_event_simulation(
    degree: int, t_d: float, t_e: float, order: str
) -> None:
    expected = event_by_event(
        dispatch=[t_d] * degree,
        compute=[t_e] * degree,
        combine=[t_d] * degree,
        link_order=link_order(degree, order),
        comm_speed=1.0,
        comp_speed=1.0,
    )
    found = makespan(
        degree=degree,
        transfer_seconds=t_d,
        compute_seconds=t_e,
        order="interleaved" if order == "interleaved" else "dispatch_first",
    )
    assert math.isclose(found, expected, rel_tol=1e-12)


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


def test_makespan_of_one_chunk_is_the_sum_of_its_parts() -> None:
    assert makespan(degree=1, transfer_seconds=3.0, compute_seconds=5.0) == 11.0
    disturbed = makespan(
        degree=1, transfer_seconds=3.0, compute_seconds=5.0, comm_speed=0.5, comp_speed=0.5
    )
    assert disturbed == 11.0


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


@settings(deadline=None)
@given(alphas, betas, sizes, alphas, betas, sizes, st.integers(1, 80))
@example(0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 64)
@example(0.0, 1e-9, 1e9, 0.0, 1e-14, 1e14, 64)
@example(1e-4, 0.0, 1e9, 1e-4, 0.0, 1e12, 64)
@example(1e-4, 1e-9, 1e9, 0.0, 1e-14, 1e13, 64)
@example(5.0, 1e-9, 1e6, 1e-9, 1e-18, 1.0, 64)
@example(1e-5, 1e-9, 1e7, 2e-5, 1e-14, 1e12, 64)
def test_best_degree_is_as_fast_as_brute_force(
    transfer_alpha: float,
    transfer_beta: float,
    payload: float,
    compute_alpha: float,
    compute_beta: float,
    macs: float,
    max_degree: int,
) -> None:
    transfer = LinearCost(alpha_seconds=transfer_alpha, beta_seconds=transfer_beta)
    compute = LinearCost(alpha_seconds=compute_alpha, beta_seconds=compute_beta)
    times = _times(transfer, payload, compute, macs, max_degree)
    degree = best_degree(
        transfer=transfer, payload_bytes=payload, compute=compute, macs=macs, max_degree=max_degree
    )
    assert 1 <= degree <= max_degree
    assert times[degree - 1] <= min(times) * (1 + 2e-12)


# Sizes at which degrees really compete: start-ups and volumes of the same order.
@settings(deadline=None)
@given(
    st.floats(1e-6, 1e-2),
    st.floats(0.01, 1e4),
    st.floats(0.01, 100.0),
    st.floats(0.001, 100.0),
    st.integers(1, 128),
)
def test_best_degree_is_as_fast_as_brute_force_where_start_ups_and_volumes_compete(
    alpha: float, volume: float, work: float, alpha_ratio: float, max_degree: int
) -> None:
    transfer = LinearCost(alpha_seconds=alpha, beta_seconds=alpha * volume)
    compute = LinearCost(alpha_seconds=alpha * alpha_ratio, beta_seconds=alpha * volume * work)
    times = _times(transfer, 1.0, compute, 1.0, max_degree)
    degree = best_degree(
        transfer=transfer, payload_bytes=1.0, compute=compute, macs=1.0, max_degree=max_degree
    )
    assert times[degree - 1] <= min(times) * (1 + 2e-12)


def test_best_degree_takes_the_smaller_of_two_that_tie() -> None:
    # With no start-up on the link, T(r) = max(18, 18/r + r + 9) is 18 from r = 3 to r = 6.
    transfer = LinearCost(alpha_seconds=0.0, beta_seconds=1.0)
    compute = LinearCost(alpha_seconds=1.0, beta_seconds=0.5)
    degree = best_degree(
        transfer=transfer, payload_bytes=9.0, compute=compute, macs=18.0, max_degree=64
    )
    assert degree == 3
    nothing = LinearCost(alpha_seconds=0.0, beta_seconds=0.0)
    assert (
        best_degree(transfer=nothing, payload_bytes=1.0, compute=nothing, macs=1.0, max_degree=64)
        == 1
    )


@pytest.mark.parametrize("scale", [1e-290, 1e-150, 1e-30, 1e30, 1e150, 1e290])
def test_best_degree_does_not_depend_on_the_unit_of_time(scale: float) -> None:
    def degree(unit: float) -> int:
        return best_degree(
            transfer=LinearCost(alpha_seconds=2e-4 * unit, beta_seconds=3e-10 * unit),
            payload_bytes=3e7,
            compute=LinearCost(alpha_seconds=1e-4 * unit, beta_seconds=8e-14 * unit),
            macs=3e11,
            max_degree=64,
        )

    assert degree(scale) == degree(1.0) > 1


def test_best_degree_refuses_a_largest_degree_below_one() -> None:
    line = LinearCost(alpha_seconds=1.0, beta_seconds=1.0)
    with pytest.raises(ValueError, match=r"max_degree .*1.*0"):
        best_degree(transfer=line, payload_bytes=1.0, compute=line, macs=1.0, max_degree=0)
