"""Hardware facts of machines: by names that torch and people use, and by what was measured."""

from dataclasses import replace

import pytest

from moetune.domain.chips import chip_of, generation_of
from moetune.domain.cluster import Fingerprint, Machine
from moetune.domain.errors import InputError
from moetune.domain.profile import Profile
from moetune.domain.reference import Network
from moetune.domain.site import check_format, site_of


def _profile(device: str, per_node: int = 8, *, kind: str = "cuda", **facts: str) -> Profile:
    return Profile(
        name="some",
        provenance="measured",
        machine=Machine(kind="cpu" if kind == "cpu" else "cuda", device=device,
                        num_devices=per_node, devices_per_node=per_node, memory_bytes=80 * 10**9),
        fingerprint=Fingerprint(hardware=facts),
    )  # fmt: skip


@pytest.mark.parametrize(("device", "chip", "generation", "links"), [
    ("NVIDIA H100 80GB HBM3", "h100", "hopper", "nvlink"),
    ("NVIDIA H100 PCIe", "h100", "hopper", "pcie"),
    ("NVIDIA H100 NVL", "h100", "hopper", "pcie"),
    ("NVIDIA GH200 480GB", "gh200", "hopper", "nvlink"),
    ("NVIDIA B300 SXM6 AC", "b300", "blackwell", "nvlink"),
    ("NVIDIA GeForce RTX 4090", "rtx4090", "ada", "pcie"),
    ("4090", "rtx4090", "ada", "pcie"),
    ("NVIDIA GeForce RTX 4090 D", "rtx4090d", "ada", "pcie"),
    ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada", "ada", "pcie"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtxpro6000", "blackwell", "pcie"),
    ("NVIDIA A800-SXM4-80GB", "a800", "ampere", "nvlink"),
    ("Tesla V100-SXM2-32GB", "v100", "volta", "nvlink"),
    ("AMD Instinct MI300X OAM", "mi300x", "cdna3", "xgmi"),
    ("AMD Instinct MI250X", "mi250x", None, "xgmi"),
])  # fmt: skip
def test_devices_have_names(device: str, chip: str, generation: str | None, links: str) -> None:
    facts = chip_of(device)
    assert facts is not None
    assert (facts.name, facts.generation, facts.links) == (chip, generation, links)


def test_links_reach_as_far_as_the_board_joins_them() -> None:
    assert site_of(_profile("NVIDIA H100 80GB HBM3")).nvlink_peers == 8
    assert site_of(_profile("NVIDIA H100 PCIe")).nvlink_peers == 0
    assert site_of(_profile("NVIDIA L40S")).nvlink_peers == 0
    assert site_of(_profile("AMD Instinct MI300X")).nvlink_peers == 0
    assert site_of(_profile("NVIDIA GH200 480GB", 4)).nvlink_peers == 4
    assert site_of(_profile("NVIDIA GH200 480GB", 1)).nvlink_peers == 0
    assert site_of(_profile("NVIDIA H100 80GB HBM3", nvlink_peers="0")).nvlink_peers == 0
    assert site_of(_profile("Some GPU")).nvlink_peers is None


def test_a_host_of_a_rack_has_four_devices() -> None:
    rack = site_of(_profile("NVIDIA GB200", 72, host_memory_bytes="960000000000"))
    assert (rack.devices_per_node, rack.nvlink_peers) == (4, 72)
    assert rack.host_bytes_per_rank(rack.devices_per_node) == 960 * 10**9 * 9 // 10 // 4


def test_what_is_not_known_is_none() -> None:
    site = site_of(_profile("Some GPU", 4))
    assert (site.vendor, site.chip, site.generation, site.capability) == (None,) * 4
    assert (site.host_memory_bytes, site.host_bytes_per_rank(8)) == (None, None)
    assert site.multiplies("fp8") is None
    assert site.multiplies("bfloat16") is True
    assert site_of(_profile("NVIDIA Quadro 9")).vendor == "nvidia"
    amd = site_of(_profile("AMD Radeon 9"))
    assert (amd.vendor, amd.multiplies("fp8")) == ("amd", None)


def test_a_measured_capability_tells_the_generation_of_an_unknown_device() -> None:
    site = site_of(_profile("NVIDIA H77", compute_capability="9.0"))
    assert (site.vendor, site.generation, site.capability) == ("nvidia", "hopper", (9, 0))
    assert generation_of((8, 6)) == "ampere"
    assert generation_of((6, 1)) is None
    assert generation_of((13, 0)) is None
    for incomplete in ("9", ".0"):
        unknown = _profile("NVIDIA H77", compute_capability=incomplete)
        assert site_of(unknown).capability is None


def test_rocm_numbers_are_no_compute_capability() -> None:
    site = site_of(_profile("AMD Instinct MI300X", compute_capability="9.4"))
    assert (site.vendor, site.generation, site.capability) == ("amd", "cdna3", None)


@pytest.mark.parametrize(("device", "formats"), [
    ("Tesla V100-SXM2-32GB", ""), ("NVIDIA A100-SXM4-80GB", ""), ("NVIDIA L40S", "fp8"),
    ("NVIDIA H20", "fp8"), ("NVIDIA B200", "fp8 mxfp8 nvfp4"),
    ("NVIDIA GeForce RTX 5090", "fp8 nvfp4"), ("AMD Instinct MI300X", "fp8"),
    ("AMD Instinct MI355X", "fp8 mxfp8"),
])  # fmt: skip
def test_narrow_formats_are_those_of_the_generation(device: str, formats: str) -> None:
    site = site_of(_profile(device))
    assert [name for name in ("fp8", "mxfp8", "nvfp4") if site.multiplies(name)] == formats.split()


def test_a_network_is_that_of_the_profile() -> None:
    alone = _profile("NVIDIA H100 80GB HBM3")
    assert (site_of(alone).num_nics, site_of(alone).nic_bytes_per_second) == (0, 0)
    rule = Network(source="", nic_bytes_per_second=50e9)
    joined = site_of(replace(alone, network=rule))
    assert (joined.num_nics, joined.nic_bytes_per_second) == (None, 50e9)
    nodes = replace(alone, machine=replace(alone.machine, num_devices=16))
    assert site_of(nodes).nic_bytes_per_second is None


def test_a_host_that_computes_has_its_ranks_memory() -> None:
    site = site_of(_profile("AMD EPYC 9B14", 2, kind="cpu"))
    assert (site.vendor, site.generation, site.nvlink_peers) == ("cpu", None, 0)
    assert site.host_memory_bytes == 160 * 10**9
    assert site.multiplies("fp8") is False


@pytest.mark.parametrize(("device", "dtype", "words"), [
    ("NVIDIA A100-SXM4-80GB", "fp8", "use --dtype bfloat16, or"),
    ("NVIDIA H100 80GB HBM3", "mxfp8", "use --dtype bfloat16 or fp8, or"),
    ("AMD Instinct MI355X", "nvfp4", "bfloat16 or fp8 or mxfp8, or"),
])  # fmt: skip
def test_a_format_without_units_is_refused_by_name(device: str, dtype: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        check_format(_profile(device), dtype)
    assert caught.value.what == f"{device} has no units that multiply {dtype}"
    assert words in caught.value.hint
