"""The front of time against memory, against every layout priced one by one."""

import itertools

import pytest

from moetune.domain.errors import InputError, RefusedLayoutError
from moetune.domain.training import LayoutRequest, TrainingJob
from moetune.solve.joint.front import memory_front
from moetune.solve.joint.search import NOISE
from tests.solve.joint.brute_force import every_layout
from tests.solve.joint.test_search import OLMOE, search_of

JOB = TrainingJob(decoder=OLMOE, world_size=8, global_batch=32, length=2048)


@pytest.mark.unmeasured
@pytest.mark.parametrize(
    ("target", "pins"),
    [
        ("megatron", LayoutRequest(tp=1, micro_batch=2)),
        ("megatron", LayoutRequest(pp=1, tp=1, micro_batch=1)),
        ("torchtitan", LayoutRequest(tp=1, pp=4, micro_batch=1)),
        ("moetune", LayoutRequest(micro_batch=1)),
    ],
)
def test_for_no_memory_is_a_layout_faster_than_the_front(target: str, pins: LayoutRequest) -> None:
    search = search_of(JOB, target=target)
    priced = map(search.priced, every_layout(search, pins))
    every = [(one.memory.peak_bytes, one.step.seconds) for one in priced]
    front = [(one.memory.peak_bytes, one.step.seconds) for one in memory_front(search, pins)]
    assert front == sorted(front)
    assert all(after[1] <= before[1] * (1 - NOISE) for before, after in itertools.pairwise(front))
    assert {*front} <= {*every}
    fastest, found = float("inf"), float("inf")
    left = [*front]
    for memory, seconds in sorted({*every}):
        fastest = min(fastest, seconds)
        while left and left[0][0] <= memory:
            found = min(found, left.pop(0)[1])
        assert fastest <= found <= fastest / (1 - NOISE) * (1 + 1e-9)


def test_pins_that_nothing_obeys_are_refused() -> None:
    for pins in (LayoutRequest(tp=3), LayoutRequest(pp=2, vpp=1, ep=4, overlap="batch")):
        with pytest.raises((InputError, RefusedLayoutError)):
            memory_front(search_of(JOB), pins)
