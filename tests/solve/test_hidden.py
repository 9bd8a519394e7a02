"""What passes hide of gradients, against an event simulation of both."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.domain.interference import CommSpeed, CompSpeed, Interference, OverlapSpeeds
from moetune.solve.hidden import Bucket, exposed_beside
from moetune.solve.layer.timeline import Task, simulate

SECONDS = st.floats(1e-6, 1.0)
SPEEDS = st.floats(0.2, 1.0)
STEPS = 5
UNDISTURBED = OverlapSpeeds(comp=1.0, comm=1.0)


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=6), SPEEDS, SPEEDS)
def test_it_is_what_both_take_longer_than_the_pass(
    parts: list[tuple[float, float]], comp: float, comm: float
) -> None:
    tasks, buckets = list[Task](), list[Bucket]()
    computed = math.fsum(one for one, _ in parts)
    passed = before = 0.0
    for number, (own, seconds) in enumerate(parts, start=1):
        passed += own
        tasks += (
            Task(f"pass {number}", "comp", "comp", own, ()),
            Task(f"bucket {number}", "comm", "comm", seconds, (f"pass {number}",)),
        )
        made = 1.0 if number == len(parts) else passed / computed
        buckets.append(Bucket(made, before))
        before += seconds
    interference = Interference(comp=CompSpeed(comm=comp), comm=CommSpeed(comp=comm))
    wanted = simulate(tasks, interference=interference).makespan_seconds - computed
    speeds = OverlapSpeeds(comp=comp, comm=comm)
    found = exposed_beside(before, buckets, computed=computed, speeds=speeds)
    assert found == pytest.approx(wanted, abs=1e-9)


@given(
    st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=6),
    st.floats(0.0, 2.0), SPEEDS, SPEEDS,
)  # fmt: skip
def test_beside_exchanges_each_has_half_of_the_link(
    parts: list[tuple[float, float]], of_computed: float, comp: float, comm: float
) -> None:
    """A forward pass in small steps: blocks wait for their buckets, which arrive in one row."""
    computed, whole = (math.fsum(one) for one in zip(*parts, strict=True))
    arrived = wanted = waited = longer = passed = 0.0
    buckets = list[Bucket]()
    for own, seconds in parts:
        buckets.append(Bucket(1 - passed / computed, whole - wanted - seconds))
        wanted, passed = wanted + seconds, passed + own
        waited, arrived = waited + max(0.0, wanted - arrived), max(arrived, wanted)
        for _ in range(STEPS):
            link_idle, exchanges = own / STEPS, own / STEPS * of_computed
            beside = link_idle / comp * comm
            share = min(1.0, (whole - arrived) / (beside + exchanges))
            longer += share * (link_idle * (1 / comp - 1) + exchanges)
            arrived += share * (beside + exchanges)
    found = exposed_beside(
        whole, buckets, computed=computed, exchanged=of_computed * computed,
        speeds=OverlapSpeeds(comp=comp, comm=comm),
    )  # fmt: skip
    assert found == pytest.approx(waited + longer, abs=1e-9)


def test_nothing_to_send_shows_nothing() -> None:
    assert exposed_beside(0.0, (), computed=1.0, speeds=UNDISTURBED) == 0.0
