"""A node's own measurements count, and a reference of its device for the rest."""

import math
from dataclasses import replace

import numpy as np
import pytest

from moetune.domain.cluster import Fingerprint, Machine
from moetune.domain.cost_keys import CollectiveKey, GemmKey
from moetune.domain.errors import InputError
from moetune.domain.profile import CopyLine, Profile, RowsLine
from moetune.domain.reference import CollectiveTable, DispatcherTable, GemmTable, Network
from moetune.domain.samples import CollectivePoint, GemmPoint, Point, Sample
from moetune.fit.based import merged
from moetune.fit.costs import costs_of
from moetune.fit.curve import curve_through
from moetune.fit.operations import Predictor
from moetune.fit.pool import Origin
from moetune.fit.profile import fit_profile
from tests.fit.measured import measured_profile

KIB, MIB = 2**10, 2**20
BIG = Machine(kind="cuda", device="GPU", num_devices=8, devices_per_node=8, memory_bytes=10**9)
NODE = replace(BIG, num_devices=2, devices_per_node=2, memory_bytes=9 * 10**8)
SIZES = tuple(2**at for at in range(12, 29, 2))


def exchange(group_size: int, num_bytes: float) -> float:
    return 1e-5 * group_size + num_bytes * 1e-10


def product(rows: float, d_in: float, d_out: float) -> float:
    return 1e-5 + rows * d_in * d_out * 1e-14


@pytest.fixture(scope="module")
def base() -> Profile:
    """A published machine of eight, with products of two shapes and all-to-alls of 2, 4 and 8."""
    return Profile(
        name="base",
        provenance="published",
        machine=BIG,
        copy=(
            CopyLine(direction="h2d", pinned=True, alpha_seconds=1e-5, beta_seconds_per_byte=1e-10),
        ),
        rows=(
            RowsLine(
                op="adam", dtype="bfloat16", alpha_seconds=1e-5, beta_seconds_per_element=1e-11
            ),
        ),
        tables=(
            GemmTable(
                label="published", source="paper", dtype="bfloat16",
                points=tuple((rows, 512, out, product(rows, 512, out))
                             for out in (512, 2048) for rows in (16, 256, 4096, 65536, 4 * out)),
            ),
            *(CollectiveTable(
                label="published", source="paper", op="all_to_all", group_size=ranks,
                points=tuple((size, exchange(ranks, size)) for size in SIZES),
            ) for ranks in (2, 4, 8)),
            CollectiveTable(label="modelled", source="rule", op="send", group_size=2,
                            points=((1024, 1e-5),)),
            DispatcherTable(label="published", source="paper", dispatcher="deepep",
                            phase="dispatch", group_size=8, num_sms=20, points=((1.0, 1.0),)),
        ),
        network=Network(source="cards", nic_bytes_per_second=1e9),
    )  # fmt: skip


def node(points: dict[Point, float], machine: Machine = NODE) -> Profile:
    """A measured node."""
    samples = [Sample(point=point, seconds=(seconds,) * 5) for point, seconds in points.items()]
    facts = Fingerprint(hardware={"device": "GPU"})
    return fit_profile(name="mine", machine=machine, fingerprint=facts, samples=samples)


@pytest.fixture(scope="module")
def both(base: Profile) -> Profile:
    """Two ranks: products a fifth slower, all-to-alls of two half as fast, some sizes of each."""
    points: dict[Point, float] = {
        GemmPoint(dtype="bfloat16", rows=rows, d_in=512, d_out=512): 1.2 * product(rows, 512, 512)
        for rows in (256, 1024, 4096)
    }
    # The base knows no float32 and no reduction: nothing to compare with.
    points[GemmPoint(dtype="float32", rows=256, d_in=512, d_out=512)] = 1e-4
    points[CollectivePoint(op="all_reduce", group_size=2, num_bytes=MIB)] = 1e-4
    for size in (64 * KIB, MIB, 16 * MIB):
        point = CollectivePoint(op="all_to_all", group_size=2, num_bytes=size)
        points[point] = 2 * exchange(2, size)
    return merged(node(points), base)


def test_measured_points_win_where_they_cover(both: Profile) -> None:
    costs = costs_of(both)
    exact = costs.seconds(CollectiveKey("all_to_all", 2), MIB)
    assert exact.seconds == pytest.approx(2 * exchange(2, MIB))
    assert exact.trust == "measured"
    between = costs.seconds(CollectiveKey("all_to_all", 2), 4 * MIB)
    assert (between.trust, between.doubts) == ("interpolated", ())
    # The line between three points, 16 times apart, not the reference's own 4 MiB.
    assert between.seconds == pytest.approx(2 * exchange(2, 4 * MIB), rel=0.07)
    exact = costs.seconds(GemmKey("bfloat16", "forward", 1, 512, 512), 1024)
    assert exact.trust == "measured"
    # The reference knows 2,048 rows, but measured ones are on both sides.
    between = costs.seconds(GemmKey("bfloat16", "forward", 1, 512, 512), 2048)
    assert between.trust == "interpolated"


def test_the_rest_is_the_reference_at_this_machines_speed(both: Profile) -> None:
    costs = costs_of(both)
    for ranks, size in ((2, 256 * MIB), (2, 4 * KIB), (4, MIB), (8, MIB)):
        estimate = costs.seconds(CollectiveKey("all_to_all", ranks), size)
        assert estimate.seconds == pytest.approx(2 * exchange(ranks, size), rel=1e-6)
        assert estimate.trust == "modelled"
        assert [doubt.stand_in for doubt in estimate.doubts] == [
            "modelled (base × 2, over 3 common points: paper)"
        ]
    other = costs.seconds(GemmKey("bfloat16", "forward", 1, 512, 2048), 4096)
    assert other.seconds == pytest.approx(1.2 * product(4096, 512, 2048), rel=1e-6)
    assert other.trust == "modelled"
    assert "base × 1.2" in other.doubts[0].stand_in
    assert [line.op for line in both.rows] == ["adam"]
    assert [line.direction for line in both.copy] == ["h2d"]


def test_groups_of_more_nodes_follow_the_base(both: Profile) -> None:
    # Sixteen ranks are two nodes of the base's eight: half of a rank's bytes cross its 1 GB/s.
    assert (both.machine.num_devices, both.machine.devices_per_node) == (2, 8)
    assert both.machine.memory_bytes == NODE.memory_bytes
    estimate = costs_of(both).seconds(CollectiveKey("all_to_all", 16), 10**9)
    assert estimate.seconds == pytest.approx(0.5)


def test_a_measured_base_stands_in_with_its_samples() -> None:
    whole = measured_profile(name="whole", noise=0.0)
    mine = replace(
        node(
            {CollectivePoint(op="all_to_all", group_size=2, num_bytes=2**20): 5e-5 + 2**20 * 4e-10},
            replace(whole.machine, num_devices=2, devices_per_node=2),
        ),
        name="mine",
    )
    both = merged(mine, whole)
    labels = {(table.label, table.source) for table in both.tables if isinstance(table, GemmTable)}
    assert labels == {("measured", "whole: samples of whole")}
    costs = costs_of(both)
    exchanged = costs.seconds(CollectiveKey("all_to_all", 4), 2**22)
    assert exchanged.seconds == pytest.approx(5e-5 + 2**22 * 4e-10, rel=1e-3)
    multiplied = costs.seconds(GemmKey("float32", "grad_weight", 4, 512, 2048), 512)
    assert multiplied.seconds == pytest.approx(2e-5 + 4 * 512 * 512 * 2048 * 2e-13, rel=1e-3)
    assert multiplied.trust == "modelled"
    # What was measured again, with the merged profile as its base, is not scaled twice.
    again = merged(mine, replace(both, samples=()))
    estimate = costs_of(again).seconds(CollectiveKey("all_to_all", 4), 2**22)
    assert estimate.seconds == pytest.approx(exchanged.seconds, rel=1e-3)


def test_another_device_or_larger_nodes_are_refused(base: Profile) -> None:
    point: dict[Point, float] = {GemmPoint(dtype="bfloat16", rows=1, d_in=1, d_out=1): 1e-5}
    with pytest.raises(InputError, match="is of cuda GPU, and this machine has cpu GPU"):
        merged(node(point, replace(NODE, kind="cpu")), base)
    with pytest.raises(InputError, match="this machine has cuda NVIDIA L4"):
        merged(node(point, replace(NODE, device="NVIDIA L4")), base)
    with pytest.raises(InputError, match="8 devices in a node, and this machine 16"):
        merged(node(point, replace(NODE, num_devices=16, devices_per_node=16)), base)


def test_outside_the_samples_sizes_times_are_the_tables_and_their_error_is_drawn() -> None:
    curve = curve_through(sizes=[16, 64, 256, 4096], seconds=[5e-4, 1e-3, 3e-3, 5e-2])
    sizes = np.array([1.0, 16.0, 63.0, 64.0, 100.0, 256.0, 257.0, 9000.0])
    for low, high in ((64.0, 256.0), (math.inf, -math.inf)):
        origin = Origin(label="published", source="a table", spread=0.1, low=low, high=high)
        factors = np.array([[1.0], [1.5]])
        both = Predictor(
            key=None,
            times=curve,
            origin=origin,
            table_factors=factors,
            factors=np.ones((1, 1)),
            cap="measured",
            stand_in="",
        )
        inside = (low <= sizes) & (sizes <= high)
        np.testing.assert_allclose(
            both.seconds_at(sizes), curve.seconds_at(sizes) * np.where(inside, 1.0, factors)
        )
        for size, is_inside in zip(sizes.tolist(), inside.tolist(), strict=True):
            assert (both.trust(size) == "modelled") != is_inside


def test_other_kernels_of_a_measured_base_are_not_taken_over(base: Profile) -> None:
    """The node may lack Liger, whose products its base has measured."""
    point = GemmPoint(dtype="bfloat16", rows=256, d_in=512, d_out=512)
    measured = node({point: 1e-3, replace(point, kernel="liger"): 1e-4}, BIG)
    mine = merged(
        node({replace(point, rows=64): 2e-4}), base=replace(base, samples=measured.samples)
    )
    measured_tables = [table for table in mine.tables if "samples" in table.source]
    assert len(measured_tables) == 1
