"""A reference machine's times on another machine: only what holds there counts."""

import math
import statistics
from dataclasses import replace

import pytest

from moetune.domain.cost_keys import CollectiveKey, GemmKey
from moetune.domain.errors import InputError
from moetune.domain.profile import CollectiveLine, GemmLine, Profile
from moetune.domain.reference import CollectiveTable, DispatcherTable, GemmTable
from moetune.fit.based import BaseScaling, Peaks, scaled_base, without_foreign
from moetune.fit.costs import costs_of
from tests.fit.measured import read

H100, H800 = read("h100-x8"), read("h800-x8")


def on_nodes_of(base: Profile, devices: int, *, nic: float = 50e9) -> Profile:
    machine = replace(base.machine, num_devices=64, devices_per_node=devices)
    assert base.network is not None
    profile = replace(
        base, machine=machine, network=replace(base.network, nic_bytes_per_second=nic)
    )
    return without_foreign(profile, base, stated=("machine", "network"))


def groups(profile: Profile, kind: type[CollectiveTable] | type[DispatcherTable]) -> set[int]:
    return {group.group_size for group in profile.tables if isinstance(group, kind)}


def test_a_group_that_does_not_fit_into_a_node_has_not_its_time() -> None:
    small = on_nodes_of(H100, 4)
    assert groups(H100, CollectiveTable) == {2, 4, 8}
    assert groups(small, CollectiveTable) == {2, 4}
    assert groups(small, DispatcherTable) == set()
    exchange = [
        costs_of(profile).seconds(CollectiveKey("all_to_all", 8), 2**26).seconds
        for profile in (H100, small)
    ]
    # Half of every rank's bytes cross its share of the cards, 50 GB/s at most.
    assert exchange[1] > 2**26 / 2 / 50e9 > exchange[0]


def test_other_cards_take_the_times_between_nodes_away() -> None:
    between = {size for size in groups(H800, DispatcherTable) if size > 8}
    assert between
    assert groups(on_nodes_of(H800, 8), DispatcherTable) == groups(H800, DispatcherTable)
    slower = on_nodes_of(H800, 8, nic=25e9)
    assert groups(slower, DispatcherTable).isdisjoint(between)
    assert groups(slower, CollectiveTable) == groups(H800, CollectiveTable)


def test_lines_of_a_base_between_nodes_go_with_its_nodes() -> None:
    base = read("rtx2080ti-x64")
    profile = replace(base, machine=replace(base.machine, devices_per_node=8))
    assert base.collective
    assert without_foreign(profile, base, stated=("machine",)).collective == ()
    assert without_foreign(profile, base, stated=("machine", "collective")) == profile


def test_stated_lines_count_instead_of_the_bases_tables() -> None:
    gemm = GemmLine(dtype="bfloat16", alpha_seconds=1e-3, beta_seconds_per_mac=1e-14)
    line = CollectiveLine(
        op="all_to_all", group_size=8, alpha_seconds=1e-2, beta_seconds_per_byte=1e-9
    )
    profile = replace(H100, gemm=(gemm,), collective=(line,))
    costs = costs_of(without_foreign(profile, H100, stated=("gemm", "collective")))
    time = costs.seconds(CollectiveKey("all_to_all", 8), 10**6).seconds
    assert time == pytest.approx(1.1e-2)
    product = costs.seconds(GemmKey("bfloat16", "forward", 1, 1000, 1000), 1000)
    assert product.seconds == pytest.approx(1e-3 + 1e-5)
    other = costs.seconds(CollectiveKey("all_reduce", 8), 10**6)
    before = costs_of(H100).seconds(CollectiveKey("all_reduce", 8), 10**6)
    assert other.seconds == before.seconds


def table(profile: Profile) -> dict[tuple[float, ...], float]:
    return next(
        {point[:3]: point[3] for point in gemms.points}
        for gemms in profile.tables
        if isinstance(gemms, GemmTable) and gemms.dtype == "bfloat16"
    )


@pytest.mark.parametrize(("base", "other", "peaks"), [
    ("h100-x8", "b200-x8", Peaks(here="2250TFLOP/s", base="989TFLOP/s")),
    ("b200-x8", "h100-x8", Peaks(here="989TFLOP/s", base="2.25PFLOP/s")),
    ("a100-x8", "h200-x8", Peaks(here="989TFLOP/s", base="312TFLOP/s")),
])  # fmt: skip
def test_published_gpus_predict_others_in_the_spread(base: str, other: str, peaks: Peaks) -> None:
    scaled = scaled_base(read(base), BaseScaling(computation=peaks))
    spread = next(gemms.spread for gemms in scaled.tables if isinstance(gemms, GemmTable))
    predicted, published = table(scaled), table(read(other))
    errors = [
        math.log(predicted[key] / published[key])
        for key in predicted.keys() & published.keys()
        if math.prod(key) >= 2**33
    ]
    assert len(errors) > 300
    assert abs(statistics.median(errors)) < spread


def test_links_are_scaled_inside_a_node_only_and_start_ups_never() -> None:
    peaks = BaseScaling(links=Peaks(here="100GB/s", base="200GB/s"))
    scaled = scaled_base(H800, peaks)
    for before, after in zip(H800.tables, scaled.tables, strict=True):
        if isinstance(before, GemmTable) or before.group_size > 8:
            assert after == before
            continue
        assert (after.label, after.spread) == ("modelled", 0.3)
        times = [[point[-1] for point in each.points] for each in (before, after)]
        assert min(times[1]) == min(times[0])
        assert max(times[1]) - min(times[1]) == pytest.approx(2 * (max(times[0]) - min(times[0])))


def test_lines_are_scaled_too() -> None:
    base = read("v100-x256")
    both = BaseScaling(
        computation=Peaks(here="250TFLOP/s", base="125TFLOP/s"),
        links=Peaks(here="150GB/s", base="300GB/s"),
    )
    scaled = scaled_base(base, both)
    assert scaled.gemm[0].beta_seconds_per_mac == base.gemm[0].beta_seconds_per_mac / 2
    for before, after in zip(base.collective, scaled.collective, strict=True):
        is_inside = before.group_size <= 8 and before.num_nodes == 0
        factor = 2 if is_inside else 1
        assert after.beta_seconds_per_byte == before.beta_seconds_per_byte * factor
        assert after.alpha_seconds == before.alpha_seconds


@pytest.mark.parametrize("here", ["1GB/s", "0TFLOP/s", "0.1TFLOP/s", "989"])
def test_peaks_that_cannot_be_are_refused(here: str) -> None:
    with pytest.raises(InputError):
        BaseScaling(computation=Peaks(here=here, base="989TFLOP/s"))
