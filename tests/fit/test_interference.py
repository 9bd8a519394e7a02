"""What exchanges and computation lose side by side, by the size of the exchange."""

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from moetune.domain.arrays import array_of, floats_of
from moetune.domain.cluster import Fingerprint, Machine
from moetune.domain.costs import Costs
from moetune.domain.samples import CollectivePoint, InterferencePoint, ResourceClass, Sample
from moetune.fit.costs import costs_of
from moetune.fit.curve import curve_through
from moetune.fit.interference import OverlapLoss, OverlappedExchange
from moetune.fit.profile import fit_profile

SIZES = (2**14, 2**18, 2**22)
ALONE_SECONDS = 1.0
CALLS_SECONDS, COPY_SECONDS_PER_BYTE = 3e-4, 5e-10
WAIT_SECONDS = 2e-4


def wire(num_bytes: float) -> float:
    return 1e-3 + 1e-8 * num_bytes


def taken(num_bytes: float) -> float:
    return CALLS_SECONDS + COPY_SECONDS_PER_BYTE * num_bytes


def beside(victim: ResourceClass, other: ResourceClass, num_bytes: int, seconds: float) -> Sample:
    point = InterferencePoint(victim=victim, others=(other,), comm_bytes=num_bytes)
    return Sample(point=point, seconds=(seconds,) * 4)


def samples() -> list[Sample]:
    made = [Sample(point=InterferencePoint(victim="comp"), seconds=(ALONE_SECONDS,) * 4)]
    for size in SIZES:
        exchange = CollectivePoint(op="all_to_all", group_size=2, num_bytes=size, in_flight=4)
        made.append(Sample(point=exchange, seconds=(wire(size),) * 4))
        speed = 1 - taken(size) / wire(size)
        made.append(beside("comp", "comm", size, ALONE_SECONDS / speed))
        made.append(beside("comm", "comp", size, wire(size) + WAIT_SECONDS))
    return made


def costs(measured: list[Sample]) -> Costs:
    machine = Machine(
        kind="cpu", device="lab", num_devices=2, devices_per_node=2, memory_bytes=2**30
    )
    profile = fit_profile(name="lab", machine=machine, fingerprint=Fingerprint(), samples=measured)
    return costs_of(profile)


@pytest.mark.parametrize("num_bytes", [2**14, 2**16, 2**18, 2**20, 2**22, 2**24])
def test_a_constant_and_a_rate_are_found_again_at_any_size(num_bytes: int) -> None:
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
    found = costs(plain)
    for num_bytes in SIZES:
        speeds = found.overlap_speeds(exchange_bytes=num_bytes, exchange_seconds=wire(num_bytes))
        assert (speeds.comp, speeds.comm) == (0.5, 1.0)


def test_speeds_stay_above_0_and_at_most_1_whatever_was_lost() -> None:
    loss = OverlapLoss(sizes=(1024.0, 2048.0), seconds=(1.0, 0.0))
    curve = curve_through(sizes=(1024.0, 2048.0), seconds=(1.0, 1.0))
    exchange = OverlappedExchange(undisturbed=curve, loss=loss, sizes=(), gains=())
    for num_bytes in (1.0, 1500.0, 1e9):
        for seconds in (0.0, 1e-6, 10.0):
            assert 0 < loss.speed(num_bytes, seconds) <= 1
            assert 0 < exchange.speed(num_bytes, seconds) <= 1


def with_exchanges_of(seconds: Mapping[int, float]) -> Costs:
    """Return the costs where exchanges beside computation take so long, by bytes."""
    replaced = {_beside_computation(size) for size in SIZES}
    made = [one for one in samples() if one.point not in replaced]
    return costs([*made, *(beside("comm", "comp", *each) for each in seconds.items())])


def _beside_computation(size: int) -> InterferencePoint:
    return InterferencePoint(victim="comm", others=("comp",), comm_bytes=size)


def test_small_exchanges_gain_where_computation_keeps_the_core_awake() -> None:
    small, large = SIZES[0], SIZES[-1]
    gained = 0.6 * wire(small)
    found = with_exchanges_of({small: wire(small) - gained, large: wire(large) + WAIT_SECONDS})
    assert found.exchanges_gain
    assert not costs(samples()).exchanges_gain
    sizes = np.array([small / 4, small, 2**18, large, 4 * large])
    speeds = found.overlap_speeds(
        exchange_bytes=array_of(sizes),
        exchange_seconds=array_of([*map(wire, sizes.tolist())]),
        in_flight=4,
    )
    each = [
        found.overlap_speeds(exchange_bytes=size, exchange_seconds=wire(size), in_flight=4)
        for size in sizes.tolist()
    ]
    assert floats_of(speeds.comm).tolist() == pytest.approx([one.comm for one in each], rel=1e-12)
    assert floats_of(speeds.comp).tolist() == pytest.approx([one.comp for one in each], rel=1e-12)
    assert each[1].comm == pytest.approx(1 / 0.4)
    assert each[2].comm > 1
    for one, size in zip(each[3:], (large, 4 * large), strict=True):
        assert one.comm <= wire(size) / (wire(size) + WAIT_SECONDS) + 1e-9
    # The gain is a share: a time that is drawn again is as much faster.
    again = found.overlap_speeds(
        exchange_bytes=small, exchange_seconds=1.3 * wire(small), in_flight=4
    )
    assert again.comm == pytest.approx(1 / 0.4)
    # Computation loses what was measured of it in an exchange as short as it is beside it.
    assert each[1].comp == pytest.approx(1 - taken(small) / wire(small))
    assert found.overlap_speeds(exchange_bytes=1.0, exchange_seconds=0.0, in_flight=4).comm == 1.0


def test_exchanges_alone_and_several_in_flight_gain_what_was_measured_of_each() -> None:
    small, made = SIZES[0], samples()
    alone = CollectivePoint(op="all_to_all", group_size=2, num_bytes=small)
    made += [
        Sample(point=alone, seconds=(4 * wire(small),) * 4),
        Sample(
            point=replace(_beside_computation(small), is_alone=True),
            seconds=(2.5 * wire(small),) * 4,
        ),
    ]
    found = costs(made)
    speeds = found.overlap_speeds(
        exchange_bytes=array_of([small, small]),
        exchange_seconds=array_of([4 * wire(small), wire(small)]),
        in_flight=cast("int", np.array([1, 4])),
    )
    several = wire(small) / (wire(small) + WAIT_SECONDS)
    assert floats_of(speeds.comm).tolist() == pytest.approx([4 / 2.5, several])


def test_no_exchange_gains_more_than_its_start_up_nor_more_above_the_largest_size() -> None:
    small, large = SIZES[0], SIZES[-1]
    found = with_exchanges_of({small: wire(small), large: 0.5 * wire(large)})  # a noisy moment
    for size in (large, 16 * large):
        one = found.overlap_speeds(exchange_bytes=size, exchange_seconds=wire(size), in_flight=4)
        assert one.comm == pytest.approx(wire(size) / (wire(size) - wire(small)), rel=0.01)


def test_other_sized_points_are_let_be() -> None:
    stray = Sample(
        point=InterferencePoint(victim="mem", others=("comm",), comm_bytes=2**14), seconds=(9.0,)
    )
    speeds = [
        costs(found).overlap_speeds(exchange_bytes=2**18, exchange_seconds=wire(2**18))
        for found in (samples(), [*samples(), stray])
    ]
    assert speeds[0] == speeds[1]


def test_an_exchange_that_is_alone_is_held_against_exchanges_alone() -> None:
    size, alone = SIZES[-1], 0.9 * wire(SIZES[-1])
    exchange = CollectivePoint(op="all_to_all", group_size=2, num_bytes=size)
    times = {
        beside("comp", "comm", size, 1.0).point: ALONE_SECONDS / 0.8,
        beside("comm", "comp", size, 1.0).point: alone + 2 * WAIT_SECONDS,
    }
    made = [Sample(point=exchange, seconds=(alone,) * 4)]
    for one in samples():
        if isinstance(one.point, InterferencePoint) and one.point in times:
            point = replace(one.point, is_alone=True)
            made.append(Sample(point=point, seconds=(times[one.point],) * 4))
        else:
            made.append(one)
    speeds = costs(made).overlap_speeds(exchange_bytes=size, exchange_seconds=alone)
    assert speeds.comp == pytest.approx(0.8)
    assert speeds.comm == pytest.approx(alone / (alone + 2 * WAIT_SECONDS))


def test_without_a_curve_of_exchanges_the_table_holds_for_all() -> None:
    bare = [one for one in samples() if not isinstance(one.point, CollectivePoint)]
    table = [
        Sample(point=InterferencePoint(victim="comp", others=("comm",)), seconds=(1.25,)),
        Sample(point=InterferencePoint(victim="comm"), seconds=(1.0,)),
        Sample(point=InterferencePoint(victim="comm", others=("comp",)), seconds=(1.6,)),
    ]
    speeds = costs([*bare, *table]).overlap_speeds(exchange_bytes=2**18, exchange_seconds=1e-2)
    assert speeds.comp == pytest.approx(0.8)
    assert speeds.comm == pytest.approx(0.625)
