"""What passes hide of gradients, against an event simulation of both."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.interference import CommSpeed, CompSpeed, Interference, OverlapSpeeds
from moetune.solve.hidden import exposed_beside
from moetune.solve.layer.timeline import Task, simulate

SECONDS = st.floats(1e-6, 1.0)
SPEEDS = st.floats(0.2, 1.0)


@given(SECONDS, SECONDS, SECONDS, SPEEDS, SPEEDS)
def test_it_is_what_both_take_longer_than_the_pass(
    others: float, last: float, computed: float, comp: float, comm: float
) -> None:
    """The last bucket is sent when all is computed, and behind the others."""
    tasks = [
        Task("pass", "comp", "comp", computed, ()),
        Task("others", "comm", "comm", others, ()),
        Task("last", "comm", "comm", last, ("pass",)),
    ]
    interference = Interference(comp=CompSpeed(comm=comp), comm=CommSpeed(comp=comm))
    wanted = simulate(tasks, interference=interference).makespan_seconds - computed
    found = exposed_beside(
        others + last, last=last, computed=computed, speeds=OverlapSpeeds(comp=comp, comm=comm)
    )
    assert found == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize(
    ("computed", "last", "shown"),
    [(0.0, 1.0, 10.0), (4.0, 1.0, 6.0), (9.0, 1.0, 1.0), (math.inf, 1.0, 1.0), (5.0, 12.0, 10.0)],
)
def test_undisturbed_it_is_what_computation_is_too_short_for(
    computed: float, last: float, shown: float
) -> None:
    speeds = OverlapSpeeds(comp=1.0, comm=1.0)
    found = exposed_beside(10.0, last=last, computed=computed, speeds=speeds)
    assert found == pytest.approx(shown)
