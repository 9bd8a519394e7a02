"""What passes hide of gradients, against an event simulation of both."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.interference import CommSpeed, CompSpeed, Interference, OverlapSpeeds
from moetune.solve.hidden import exposed_beside, num_buckets
from moetune.solve.layer.timeline import Task, simulate

SECONDS = st.floats(1e-6, 1.0)
SPEEDS = st.floats(0.2, 1.0)


@given(SECONDS, SECONDS, SECONDS, st.integers(2, 40), SPEEDS, SPEEDS)
def test_it_is_what_both_take_longer_than_the_pass(
    seconds: float, first: float, computed: float, num_buckets: int, comp: float, comm: float
) -> None:
    """The first blocks' bucket is sent when all is computed, the others beside all but a share."""
    last = min(seconds, max(first, seconds / num_buckets))
    tasks = [
        Task("no bucket yet", "comp", "comp", computed / num_buckets, ()),
        Task("pass", "comp", "comp", computed - computed / num_buckets, ()),
        Task("others", "comm", "comm", seconds - last, ("no bucket yet",)),
        Task("first", "comm", "comm", last, ("pass",)),
    ]
    interference = Interference(comp=CompSpeed(comm=comp), comm=CommSpeed(comp=comm))
    wanted = simulate(tasks, interference=interference).makespan_seconds - computed
    found = exposed_beside(
        seconds, first=first, computed=computed, num_buckets=num_buckets,
        speeds=OverlapSpeeds(comp=comp, comm=comm),
    )  # fmt: skip
    assert found == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(
    ("computed", "first", "shown"),
    [(0.0, 1.0, 10.0), (5.0, 1.0, 6.0), (9.0, 1.0, 2.8), (math.inf, 1.0, 2.0),
     (math.inf, 3.0, 3.0), (6.0, 12.0, 10.0)],
)  # fmt: skip
def test_undisturbed_it_is_what_computation_is_too_short_for(
    computed: float, first: float, shown: float
) -> None:
    speeds = OverlapSpeeds(comp=1.0, comm=1.0)
    found = exposed_beside(10.0, first=first, computed=computed, num_buckets=5, speeds=speeds)
    assert found == pytest.approx(shown)
    alone = exposed_beside(10.0, first=first, computed=computed, num_buckets=1, speeds=speeds)
    assert alone == 10.0


def test_buckets_have_a_block_or_a_mebibyte_at_least() -> None:
    assert [num_buckets(4, size * 2**20) for size in (0.5, 1.5, 3.9, 4, 100)] == [1, 1, 3, 4, 4]
    assert num_buckets(0, 2**30) == 1
