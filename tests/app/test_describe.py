"""A described machine: what is said counts, and all else is named and of the reference."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from moetune.app.describe import Description, describe, gpus, reference_of
from moetune.app.files import bundled_profiles, load_profile_file, profile_in_toml
from moetune.app.training import plan_training
from moetune.app.training_plan import TrainingRequest
from moetune.domain.chips import LINK_BYTES_PER_SECOND, chip_of, peak_flops
from moetune.domain.errors import InputError
from moetune.domain.site import site_of
from moetune.domain.targets import find_target
from moetune.domain.training import LayoutRequest, TrainingJob
from moetune.huggingface.registry import named_model

OURS = Description(
    name="ours", gpu="h100", gpus_per_node=8, nodes=4, nics=4, nic_rate="400Gbit/s", memory="80GB"
)
OTHER = """
schema = 1
name = "other"
base = "h100-x8"
provenance = "modelled"
[machine]
device = "Some GPU"
num_devices = 32
memory = "48GB"
[scaled]
computation = { here = "494.75TFLOP/s", base = "989.5TFLOP/s" }
memory = { here = "1.675TB/s", base = "3.35TB/s" }
"""
"""A GPU that no reference machine has, as people write it by hand."""


def test_the_file_says_what_was_described_and_nothing_else(tmp_path: Path) -> None:
    described = describe(OURS)
    values = tomllib.loads(described.text)
    assert values["machine"] == {"num_devices": 32, "devices_per_node": 8, "memory": "80GB"}
    assert (values["network"]["nics"], values["network"]["nic_rate"]) == (4, "400Gbit/s")
    assert (values["base"], values["provenance"]) == ("h100-x8", "modelled")
    assert len(described.text.splitlines()) < 30
    path = tmp_path / "ours.toml"
    path.write_text(described.text)
    assert load_profile_file(path) == described.profile
    base = load_profile_file(bundled_profiles()["h100-x8"])
    assert described.profile.tables == base.tables
    assert described.profile.machine.device == base.machine.device
    assert described.profile.network is not None
    assert described.profile.network.nic_bytes_per_second == 25e9


def test_every_stand_in_is_a_comment_of_the_file() -> None:
    for description in (OURS, replace(OURS, nodes=1, nics=None, nic_rate="", memory="")):
        described = describe(description)
        assert len(described.stand_ins) >= 4
        assert all(f"# - {stand_in}\n" in described.text for stand_in in described.stand_ins)
    least = " ".join(describe(replace(OURS, nodes=1, nics=None, nic_rate="", memory="")).stand_ins)
    assert "memory of a GPU" in least
    assert "network between nodes" in least
    most = " ".join(describe(OURS).stand_ins)
    assert "memory of a GPU" not in most
    larger = " ".join(describe(replace(OURS, gpus_per_node=16)).stand_ins)
    assert "groups of 8" in larger


def test_each_gpu_has_one_reference_with_a_rule_and_a_data_sheet() -> None:
    assert set(gpus()) == set(LINK_BYTES_PER_SECOND)
    for gpu, name in gpus().items():
        profile = reference_of(gpu.upper())
        assert profile.name == name
        assert profile.network is not None
        chip = chip_of(profile.machine.device)
        assert chip is not None
        assert chip.name == gpu
        assert peak_flops(profile.machine.device, "bfloat16")


@pytest.mark.parametrize("gpu", ["h1000", "a10g", "h100 pcie", ""])
def test_an_unknown_gpu_is_answered_with_those_that_there_are(gpu: str) -> None:
    with pytest.raises(InputError) as caught:
        describe(replace(OURS, gpu=gpu))
    assert all(text in caught.value.hint for text in ("gb200", "[scaled]"))


@pytest.mark.parametrize(("gpu", "name"), [
    ("H100 SXM5", "h100-x8"), ("NVIDIA H100 80GB HBM3", "h100-x8"),
    ("GeForce RTX 4090", "rtx4090-x8"), ("4090", "rtx4090-x8"),
    ("AMD Instinct MI300X", "mi300x-x8"), ("mi355", "mi355x-x8"), ("GH200", "gh200-x4"),
])  # fmt: skip
def test_a_gpu_is_known_by_what_people_and_torch_call_it(gpu: str, name: str) -> None:
    assert reference_of(gpu).name == name


@pytest.mark.parametrize("gpu", ["A100-SXM4-40GB", "H200 NVL", "RTX 4090 D", "GH200 480GB"])
def test_another_board_of_a_chip_is_not_taken_for_it(gpu: str) -> None:
    with pytest.raises(InputError, match="no reference machine has"):
        reference_of(gpu)


def test_links_of_pci_express_are_no_nvlink() -> None:
    slow = describe(replace(OURS, link_rate="28GB/s"))
    assert site_of(slow.profile).nvlink_peers == 0
    assert all(table.kind != "dispatcher" for table in slow.profile.tables)
    assert tomllib.loads(slow.text)["scaled"] == {"links": {"here": "28GB/s", "base": "450GB/s"}}
    assert site_of(describe(OURS).profile).nvlink_peers == 8


def test_a_hosts_memory_is_the_references_where_a_node_is() -> None:
    assert site_of(describe(OURS).profile).host_memory_bytes == 2048 * 2**30
    assert site_of(describe(replace(OURS, gpus_per_node=4)).profile).host_memory_bytes is None
    for count, known in ((4, 900 * 10**9), (36, 900 * 10**9), (2, None)):
        rack = describe(replace(OURS, gpu="gb200", gpus_per_node=count))
        assert site_of(rack.profile).host_memory_bytes == known
        assert ("memory of a host, 838 GiB" in rack.stand_ins) == (known is not None)
    assert "memory of a host, 2.00 TiB" in describe(OURS).stand_ins


def test_another_gpus_parts_are_scaled() -> None:
    before = {row.op: row.beta_seconds_per_element for row in reference_of("h100").rows}
    scaled = profile_in_toml(tomllib.loads(OTHER))
    rates = {row.op: row.beta_seconds_per_element for row in scaled.rows}
    assert (scaled.machine.device, site_of(scaled).host_memory_bytes) == ("Some GPU", None)
    assert rates.keys() == before.keys() > {"adam", "gelu", "chunked_layer"}
    for op, beta in before.items():
        times = 1 if op.startswith("chunked_layer") else 2  # the host's
        assert rates[op] == pytest.approx(times * beta, rel=1e-3)


@pytest.mark.parametrize(("changes", "words"), [
    ({"name": "h100-x8"}, "reference machine"), ({"name": "a\nb"}, "cannot be used"),
    ({"name": " "}, "cannot be used"), ({"nics": None}, "--nics and --nic-rate"),
    ({"memory": "0"}, "memory_bytes"), ({"memory": "9999999999TB"}, "too large"),
    ({"link_rate": "28"}, "has no unit"),
])  # fmt: skip
def test_a_description_that_cannot_be_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InputError) as caught:
        describe(replace(OURS, **changes))  # type: ignore[arg-type] # of any field
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ['a"b\\', "Größe 7", "x # y", "''' = 1"])
def test_any_name_is_written_as_toml(name: str) -> None:
    assert describe(replace(OURS, name=name)).profile.name == name


def test_a_stand_in_widens_the_range_of_a_whole_models_step() -> None:
    job = TrainingJob(
        decoder=named_model("olmoe").decoder, world_size=32, global_batch=256, length=2048
    )
    request = TrainingRequest(
        job=job, pins=LayoutRequest(tp=1, pp=1, ep=32, micro_batch=1), target=find_target("moetune")
    )
    known = load_profile_file(bundled_profiles()["h100-x8"])
    same = describe(replace(OURS, nics=8)).profile
    other = profile_in_toml(tomllib.loads(OTHER.replace("494.75", "989")))
    plans = [plan_training(request, machine) for machine in (known, same, other)]
    widths = [plan.confidence.p95_step_seconds / plan.confidence.p05_step_seconds for plan in plans]
    assert widths[0] < widths[1] < widths[2]


@pytest.mark.parametrize(
    ("gpu", "near"), [("MI325X", "mi300x"), ("NVIDIA GeForce RTX 3090", None), ("H101", "h100")]
)
def test_only_a_gpu_of_the_same_generation_is_proposed(gpu: str, near: str | None) -> None:
    with pytest.raises(InputError) as caught:
        reference_of(gpu)
    assert ("did you mean" in caught.value.hint) == (near is not None)
    assert near is None or f"did you mean {near}?" in caught.value.hint
