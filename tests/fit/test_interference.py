"""What exchanges and computation lose side by side, by the size of the exchange."""

from dataclasses import replace

import numpy as np
import pytest

from moetune.domain.cluster import Fingerprint, Machine
from moetune.domain.costs import Costs
from moetune.domain.samples import CollectivePoint, InterferencePoint, ResourceClass, Sample
from moetune.fit.costs import costs_of
from moetune.fit.interference import OverlapLoss
from moetune.fit.profile import fit_profile

SIZES = (2**14, 2**18, 2**22)
ALONE_SECONDS = 1.0
CALLS_SECONDS, COPY_SECONDS_PER_BYTE = 3e-4, 5e-10
WAIT_SECONDS = 2e-4


def wire(num_bytes: float) -> float:
    return 1e-3 + 1e-8 * num_bytes


def taken(num_bytes: float) -> float:
    return CALLS_SECONDS + COPY_SECONDS_PER_BYTE * num_bytes


def overlap(victim: ResourceClass, other: ResourceClass, num_bytes: int, seconds: float) -> Sample:
    point = InterferencePoint(victim=victim, others=(other,), comm_bytes=num_bytes)
    return Sample(point=point, seconds=(seconds,) * 4)


def samples() -> list[Sample]:
    made = [Sample(point=InterferencePoint(victim="comp"), seconds=(ALONE_SECONDS,) * 4)]
    for size in SIZES:
        exchange = CollectivePoint(op="all_to_all", group_size=2, num_bytes=size, in_flight=4)
        made.append(Sample(point=exchange, seconds=(wire(size),) * 4))
        speed = 1 - taken(size) / wire(size)
        made.append(overlap("comp", "comm", size, ALONE_SECONDS / speed))
        made.append(overlap("comm", "comp", size, wire(size) + WAIT_SECONDS))
    return made


def costs(measured: list[Sample]) -> Costs:
    machine = Machine(
        kind="cpu", device="lab", num_devices=2, devices_per_node=2, memory_bytes=2**30
    )
    profile = fit_profile(name="lab", machine=machine, fingerprint=Fingerprint(), samples=measured)
    return costs_of(profile)


@pytest.mark.parametrize("num_bytes", [2**14, 2**16, 2**18, 2**20, 2**22, 2**24])
def test_a_constant_and_a_rate_are_recovered_at_any_size(num_bytes: int) -> None:
    speeds = costs(samples()).overlap_speeds(
        exchange_bytes=num_bytes, exchange_seconds=wire(num_bytes)
    )
    assert speeds.comp == pytest.approx(1 - taken(num_bytes) / wire(num_bytes), rel=1e-6)
    assert speeds.comm == pytest.approx(
        wire(num_bytes) / (wire(num_bytes) + WAIT_SECONDS), rel=1e-6
    )


def test_without_sizes_the_table_holds_for_all() -> None:
    plain = [
        Sample(point=InterferencePoint(victim="comp"), seconds=(1.0,)),
        Sample(point=InterferencePoint(victim="comp", others=("comm",)), seconds=(2.0,)),
    ]
    made = costs(plain)
    for num_bytes in SIZES:
        speeds = made.overlap_speeds(exchange_bytes=num_bytes, exchange_seconds=wire(num_bytes))
        assert [speed.item() for speed in speeds] == [0.5, 1.0]


def test_speeds_stay_above_0_and_at_most_1_whatever_was_lost() -> None:
    loss = OverlapLoss(sizes=(1024.0, 2048.0), seconds=(1.0, 0.0))
    for num_bytes in (1.0, 1500.0, 1e9):
        for seconds in (0.0, 1e-6, 10.0):
            assert 0 < loss.speed(num_bytes, seconds) <= 1
            assert 0 < loss.stretched_speed(num_bytes, seconds) <= 1


def test_one_size_tells_one_loss_for_all() -> None:
    loss = OverlapLoss(sizes=(1024.0,), seconds=(0.5,))
    many = np.array([1.0, 4.0])
    assert loss.stretched_speed(many, many).tolist() == pytest.approx([1 / 1.5, 4 / 4.5])
    assert loss.stretched_speed(8.0, 1.0) == pytest.approx(1 / 1.5)


def test_an_exchange_that_is_alone_is_held_against_exchanges_alone() -> None:
    size, alone = SIZES[-1], 0.9 * wire(SIZES[-1])
    exchange = CollectivePoint(op="all_to_all", group_size=2, num_bytes=size)
    times = {
        overlap("comp", "comm", size, 1.0).point: ALONE_SECONDS / 0.8,
        overlap("comm", "comp", size, 1.0).point: alone + 2 * WAIT_SECONDS,
    }
    made = [Sample(point=exchange, seconds=(alone,) * 4)]
    for sample in samples():
        if isinstance(sample.point, InterferencePoint) and sample.point in times:
            point = replace(sample.point, is_alone=True)
            made.append(Sample(point=point, seconds=(times[sample.point],) * 4))
        else:
            made.append(sample)
    speeds = costs(made).overlap_speeds(exchange_bytes=size, exchange_seconds=alone)
    assert speeds.comp == pytest.approx(0.8)
    assert speeds.comm == pytest.approx(alone / (alone + 2 * WAIT_SECONDS))


def test_without_a_curve_of_exchanges_the_table_holds_for_all() -> None:
    bare = [sample for sample in samples() if not isinstance(sample.point, CollectivePoint)]
    table = [
        Sample(point=InterferencePoint(victim="comp", others=("comm",)), seconds=(1.25,)),
        Sample(point=InterferencePoint(victim="comm"), seconds=(1.0,)),
        Sample(point=InterferencePoint(victim="comm", others=("comp",)), seconds=(1.6,)),
    ]
    speeds = costs([*bare, *table]).overlap_speeds(exchange_bytes=2**18, exchange_seconds=1e-2)
    assert speeds.comp == pytest.approx(0.8)
    assert speeds.comm == pytest.approx(0.625)
