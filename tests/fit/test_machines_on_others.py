"""Reference machines that are short files on others: published rates, and nothing foreign."""

import pytest

from moetune.app.files import bundled_profiles
from moetune.domain.cost_keys import CollectiveKey, CopyKey, GemmKey, RowsKey
from moetune.domain.costs import seconds_if_known
from moetune.domain.samples import CollectiveOp
from moetune.domain.site import Site, site_of
from moetune.fit.costs import costs_of
from tests.fit.measured import read

GIB = 2**30
ON_OTHERS = ("a800-x8", "gh200-x1", "gh200-x4", "h100-96gb-x8", "h20-x8", "l40s-x8", "mi300x-x8",
             "mi355x-x8", "rtx4090-x8")  # fmt: skip


def site(name: str) -> Site:
    return site_of(read(name))


def collective(name: str, op: CollectiveOp, ranks: int, num_bytes: float) -> float:
    return costs_of(read(name)).seconds(CollectiveKey(op, ranks), num_bytes).seconds


def gemm(name: str, dtype: str = "bfloat16") -> float:
    """Return the seconds of 8192³, where start-ups do not count."""
    return costs_of(read(name)).seconds(GemmKey(dtype, "forward", 1, 8192, 8192), 8192).seconds


@pytest.mark.parametrize("name", ON_OTHERS)
def test_a_machine_on_another_is_modelled_and_says_whose_numbers_it_has(name: str) -> None:
    profile = read(name)
    assert profile.provenance == "modelled"
    assert profile.citation
    assert (profile.name, profile.network is not None) == (name, True)
    reported = int(profile.fingerprint.hardware["memory_bytes"])
    assert reported - profile.machine.memory_bytes == 2 * GIB


@pytest.mark.parametrize(("ranks", "published"), [(2, 47.671), (8, 312.912)])
def test_all_reduces_of_mi300x_have_published_bandwidth(ranks: int, published: float) -> None:
    # stas00/ml-engineering, network/README.md: all_reduce_bench.py with 4 GiB.
    num_bytes = 4 * GIB
    wire = 2 * (ranks - 1) / ranks * num_bytes
    bandwidth = wire / collective("mi300x-x8", "all_reduce", ranks, num_bytes) / 1e9
    assert bandwidth == pytest.approx(published, rel=0.07)


@pytest.mark.parametrize(("name", "published"), [("mi300x-x8", 304e9), ("mi355x-x8", 333e9)])
def test_exchanges_of_amds_meshes_are_near_those_of_uccl(name: str, published: float) -> None:
    # uccl-project/uccl, ep/README.md: combine of eight ranks, bytes over time.
    num_bytes = 4096 * 7168 * 2 * 8
    rate = num_bytes * 7 / 8 / collective(name, "all_to_all", 8, num_bytes)
    assert rate == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize(("name", "base", "ratio"), [
    ("h20-x8", "h100-x8", 989.5 / 148), ("l40s-x8", "h100-x8", 989.5 / 362.05),
    ("rtx4090-x8", "h100-x8", 989.5 / 165.2), ("mi300x-x8", "h100-x8", 794.5 / 668.4),
    ("mi355x-x8", "b200-x8", 1745 / 1565), ("gh200-x4", "h100-x8", 1),
    ("a800-x8", "a100-x8", 1),
])  # fmt: skip
def test_a_gemm_goes_by_the_ratio_of_the_rates(name: str, base: str, ratio: float) -> None:
    assert gemm(name) / gemm(base) == pytest.approx(ratio, rel=0.01)


def test_a_host_and_its_cards_are_those_of_the_sources() -> None:
    hosts = {name: site(name).host_memory_bytes for name in bundled_profiles()}
    assert (hosts["l40s-x8"], hosts["mi300x-x8"]) == (1536 * GIB, 1536 * GIB)
    assert (hosts["gh200-x4"], hosts["gb200-nvl72"]) == (480 * 10**9, 900 * 10**9)
    assert hosts["rtx4090-x8"] is None
    assert (hosts["h20-x8"], hosts["b300-x8"]) == (1024 * GIB, 4096 * GIB)
    cards = {name: site(name).num_nics for name in ON_OTHERS}
    assert cards == {"a800-x8": 4, "gh200-x1": 1, "gh200-x4": 4, "h100-96gb-x8": 8, "h20-x8": 8,
                     "l40s-x8": 4, "mi300x-x8": 8, "mi355x-x8": 8, "rtx4090-x8": 1}  # fmt: skip
    assert site("gb200-nvl72").num_nics == 4


def test_hosts_of_one_device_send_over_the_network_alone() -> None:
    # 50 GB/s at 92 %, of which an all-reduce of two ranks passes all of its bytes, and a send.
    for op in ("all_reduce", "send"):
        seconds = collective("gh200-x1", op, 2, GIB)
        assert seconds == pytest.approx(GIB / 46e9, rel=0.02)
    assert collective("gh200-x1", "all_to_all", 4, GIB) > 0.75 * GIB / 46e9


def test_slower_memory_and_host_links_scale_what_goes_by_them() -> None:
    def adam(name: str) -> float:
        estimate = seconds_if_known(costs_of(read(name)), RowsKey("adam", "bfloat16"), 1e9)
        assert estimate is not None
        return estimate.seconds

    def copied(name: str) -> float:
        return costs_of(read(name)).seconds(CopyKey("h2d", pinned=True), GIB).seconds

    assert adam("h100-96gb-x8") / adam("h100-x8") == pytest.approx(3.35 / 2.4, rel=0.01)
    assert adam("mi300x-x8") / adam("h100-x8") == pytest.approx(3.35 / 5.3, rel=0.01)
    assert copied("gh200-x4") / copied("h100-x8") == pytest.approx(63 / 359, rel=0.02)
    assert copied("rtx4090-x8") / copied("h100-x8") == pytest.approx(2, rel=0.01)


def test_two_gh200_of_four_have_one_of_three_links() -> None:
    whole, pair = (collective("gh200-x4", "all_to_all", ranks, GIB) for ranks in (4, 2))
    assert 2 < pair / 2 * 3 / whole < 4.5  # a rank of two sends half, and of four three quarters
    h100 = collective("h100-x8", "all_reduce", 2, GIB)
    assert collective("gh200-x4", "all_reduce", 2, GIB) / h100 == pytest.approx(3, rel=0.03)


@pytest.mark.parametrize("name", ["gb200-nvl72", "gb300-nvl72"])
def test_two_gpus_share_a_graces_link(name: str) -> None:
    one_way, both = (
        next(
            1 / line.beta_seconds_per_byte
            for line in read(name).copy
            if line.direction == "h2d" and line.both_ways == both_ways
        )
        for both_ways in (False, True)
    )
    assert [one_way, both] == pytest.approx([210e9, 87e9], rel=1e-3)
