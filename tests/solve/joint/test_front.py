"""The front of time against memory, against every layout priced one by one."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from math import inf

import pytest

from moetune.domain.errors import InputError
from moetune.domain.training import FoldedLayout, LayoutRequest, TrainingJob
from moetune.solve.joint.front import front_within, memory_front
from moetune.solve.joint.ties import NOISE
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
    space, every = search.space, []
    for shape, overlap, recompute, dispatcher in itertools.product(
        space.shapes(pins), search.target.overlaps, space.recomputes(pins),
        search.target.dispatchers,
    ):  # fmt: skip
        layout = replace(shape, overlap=overlap, dispatcher=dispatcher, recompute=recompute)
        if space.is_allowed(layout):
            cuts = {layout, search.prices.balanced(layout)} if layout.pp > 1 else {layout}
            cuts |= {
                replace(one, zero=to)
                for one in cuts
                for to in space.zeros(pins, layout.pp, layout.tp)
            }
            if not search.target.offloads_states:  # which a plan asks for where nothing else fits
                cuts |= {way for one in cuts for way in _in_host_memory(one)}
            priced = map(search.priced, filter(space.is_allowed, cuts))
            every += [(one.memory.peak_bytes, one.step.seconds) for one in priced]
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


def _in_host_memory(layout: FoldedLayout) -> Iterator[FoldedLayout]:
    num = JOB.decoder.num_layers
    for share, waiting in itertools.product((0.0, 0.25, 0.5, 0.75, 1.0), range(num)):
        yield replace(layout, offload_optimizer=share, offload_activations=waiting / num)


def test_a_part_of_the_front_is_that_of_the_whole() -> None:
    search, pins = search_of(JOB, target="megatron"), LayoutRequest(tp=1, micro_batch=2)
    front = memory_front(search, pins)
    slowest, most = front[1].step.seconds, front[-2].memory.peak_bytes
    assert len(front) > 4
    assert front_within(search, pins, slowest_seconds=slowest, most_bytes=most) == front[1:-1]
    assert front_within(search, pins, slowest_seconds=0.0, most_bytes=most) == ()


def test_the_fastest_alone_is_the_end_of_the_front() -> None:
    search, pins = search_of(JOB, target="megatron"), LayoutRequest(pp=4, micro_batch=1)
    *_, fastest = memory_front(search, pins)
    seconds = fastest.step.seconds
    assert front_within(search, pins, slowest_seconds=seconds, most_bytes=inf) == (fastest,)


def test_pins_that_nothing_obeys_are_refused() -> None:
    with pytest.raises(InputError):
        memory_front(search_of(JOB), LayoutRequest(tp=3))
