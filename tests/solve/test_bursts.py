"""What pauses of a link are worth to a phase, against a token bucket that is simulated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.costs import NO_BURST, LinearCost
from moetune.domain.layer import LayerShape
from moetune.solve.layer.all_to_all import AllToAllCosts
from moetune.solve.layer.times import phase_time
from tests.solve.costs_by_hand import LinearCosts

LAYER = LayerShape(d_model=64, d_hidden=128, num_experts=2)
TOKENS = 1024
MOVES_SECONDS = 2e-3


def layer(
    burst_seconds: float, *, compute: float, wire: float, share: float = NO_BURST.share
) -> AllToAllCosts:
    """Return a layer whose experts and exchanges of all tokens take so long, in any cut."""
    macs = TOKENS * 64 * 128
    return AllToAllCosts(
        layer=LAYER, world_size=2, dtype="float32",
        costs=LinearCosts(
            gemm_cost=LinearCost(alpha_seconds=0.0, beta_seconds=compute / macs / 2),
            transfer_cost=LinearCost(alpha_seconds=0.0, beta_seconds=wire / (TOKENS * 64 * 4)),
            rows_seconds=dict.fromkeys(("gather", "scatter_add"), MOVES_SECONDS / TOKENS / 64),
            pause_gain_seconds=burst_seconds, pause_gain_share=share, is_measured=True,
        ),
    )  # fmt: skip


def bucket_seconds(burst_seconds: float, pause_seconds: float, jobs: list[float]) -> float:
    """Return the end of one chunk's dispatch, experts and combine over a token bucket.

    A credit of c seconds lets the first c seconds of an exchange pass at once; it comes back in as
    long a pause.
    """
    dispatch, experts, combine = jobs
    credit = min(burst_seconds, pause_seconds)
    end = dispatch - min(credit, dispatch)
    credit = min(burst_seconds, credit - min(credit, dispatch) + experts)
    return end + experts + combine - min(credit, combine)


@given(burst=st.floats(0, 0.02), compute=st.floats(1e-3, 0.1), wire=st.floats(0.03, 0.1))
def test_one_chunk_saves_what_the_bucket_got_back(
    burst: float, compute: float, wire: float
) -> None:
    costs = layer(burst, compute=compute, wire=wire)
    found = phase_time(costs=costs, phase="forward", tokens=TOKENS, degree=1)
    expected = bucket_seconds(burst, 2 * MOVES_SECONDS, [wire, compute, wire])
    left_over = max(burst - 2 * MOVES_SECONDS, 0.0)  # a credit that was not used is still there
    assert found.seconds == pytest.approx(expected, abs=left_over + 1e-9)
    assert found.seconds >= expected - 1e-9


@given(burst=st.floats(1e-4, 0.02), degree=st.integers(3, 32))
def test_a_busy_link_saves_one_pause_in_a_phase(burst: float, degree: int) -> None:
    costs = layer(burst, compute=0.01, wire=0.1)
    found = phase_time(costs=costs, phase="forward", tokens=TOKENS, degree=degree)
    assert found.seconds == pytest.approx(0.2 - min(burst, 2 * MOVES_SECONDS))


@given(burst=st.floats(0, 10.0), degree=st.integers(1, 32), compute=st.floats(1e-4, 1.0))
def test_a_burst_never_makes_a_phase_longer_nor_an_exchange_free(
    burst: float, degree: int, compute: float
) -> None:
    def phase(burst_seconds: float) -> tuple[float, float]:
        costs = layer(burst_seconds, compute=compute, wire=0.1)
        found = phase_time(costs=costs, phase="forward", tokens=TOKENS, degree=degree)
        return found.seconds, found.transfer.seconds

    without, lone = phase(0.0)
    found, transfer = phase(burst)
    assert found <= without * (1 + 1e-12)
    assert transfer >= 0.05 * lone * (1 - 1e-12)


def test_one_chunk_of_known_times_saves_its_pauses() -> None:
    """Both exchanges begin after a pause: the moves of rows, and the experts."""
    plain, ahead = (
        phase_time(
            costs=layer(burst, compute=0.02, wire=0.05), phase="forward", tokens=TOKENS, degree=1
        ).seconds
        for burst in (0.0, 0.003)
    )
    assert plain == pytest.approx(0.05 + 0.02 + 0.05)
    assert plain - ahead == pytest.approx(min(0.003, 2 * MOVES_SECONDS) + 0.003)


@given(wire=st.floats(1e-3, 0.1), share=st.floats(0.05, 0.5))
def test_short_exchanges_gain_no_more_than_their_share(wire: float, share: float) -> None:
    costs = layer(1.0, compute=1.0, wire=wire, share=share)
    found = phase_time(costs=costs, phase="forward", tokens=TOKENS, degree=1)
    gained = min(share * wire, 2 * MOVES_SECONDS) + share * wire
    assert found.seconds == pytest.approx(1.0 + 2 * wire - gained)
