"""A described machine: what is said counts, and all else is named and of the reference."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from moetune.domain.data_sheets import LINK_BYTES_PER_SECOND, peak_flops
from moetune.domain.errors import InputError
from moetune.domain.targets import find_target
from moetune.domain.training import LayoutRequest, TrainingJob
from moetune.huggingface.registry import named_model
from moetune.workflows.describe import Description, check_new, describe, gpus, reference_of
from moetune.workflows.files import bundled_profiles, load_profile_file
from moetune.workflows.training import plan_training
from moetune.workflows.training_plan import TrainingRequest

OURS = Description(
    name="ours", gpu="h100", gpus_per_node=8, nodes=4, nics=4, nic_rate="400Gbit/s", memory="80GB"
)
OTHER = replace(OURS, gpu="L40S", tflops="362TFLOP/s", memory="48GB")


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
    for description in (OURS, OTHER, replace(OURS, nodes=1, nics=None, nic_rate="", memory="")):
        described = describe(description)
        assert len(described.stand_ins) >= 4
        assert all(f"# - {one}\n" in described.text for one in described.stand_ins)
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
        assert gpu in profile.machine.device.lower()
        assert peak_flops(profile.machine.device, "bfloat16")


@pytest.mark.parametrize("gpu", ["h1000", "l40s", "h100 pcie", ""])
def test_an_unknown_gpu_is_answered_with_those_that_there_are(gpu: str) -> None:
    with pytest.raises(InputError) as caught:
        describe(replace(OURS, gpu=gpu))
    assert all(one in caught.value.hint for one in ("gb200", "--tflops"))


@pytest.mark.parametrize(
    ("tflops", "base"),
    [("300TFLOP/s", "a100-x8"), ("0.9PFLOP/s", "h100-x8"), ("2400TFLOP/s", "gb200-nvl72")],
)
def test_another_gpu_is_compared_with_that_of_the_nearest_peak(tflops: str, base: str) -> None:
    described = describe(replace(OTHER, tflops=tflops))
    assert described.base == base
    assert described.profile.machine.device == "L40S"


def test_another_gpus_parts_are_scaled_and_all_in_the_file() -> None:
    description = replace(OTHER, base="h100-x8", memory_bandwidth="1.675TB/s", link_rate="45GB/s")
    described = describe(description)
    values = tomllib.loads(described.text)
    assert values["scaled"] == {
        "computation": {"here": "362TFLOP/s", "base": "989.5TFLOP/s"},
        "links": {"here": "45GB/s", "base": "450GB/s"},
    }
    before = {row.op: row.beta_seconds_per_element for row in reference_of("h100").rows}
    found = {row.op: row.beta_seconds_per_element for row in described.profile.rows}
    assert found.keys() == before.keys() > {"adam", "gelu", "chunked_layer"}
    for op, beta in before.items():
        times = 1 if op.startswith("chunked_layer") else 2  # the host's
        assert found[op] == pytest.approx(times * beta, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nics": None, "nic_rate": ""}, "need a network"),
        ({"nics": None}, "go together"),
        ({"name": "h100-x8"}, "reference machine"),
        ({"name": "a\nb"}, "cannot be one"),
        ({"name": " "}, "cannot be one"),
        ({"base": "h100x8"}, "did you mean h100-x8"),
        ({"base": "v100-x256"}, "no rule"),
        ({"base": "a100-x8"}, "another GPU"),
        ({"memory": "0"}, "memory_bytes"),
        ({"memory": "9999999999TB"}, "too large"),
        ({"tflops": "1GFLOP/s"}, "factor of 1000"),
    ],
)
def test_a_description_that_cannot_be_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InputError) as caught:
        describe(replace(OURS, **changes))  # type: ignore[arg-type] # of any field
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ['a"b\\', "Größe 7", "x # y", "''' = 1"])
def test_any_name_is_written_as_toml(name: str) -> None:
    assert describe(replace(OURS, name=name)).profile.name == name


def test_a_file_is_new_and_ends_in_toml(tmp_path: Path) -> None:
    check_new(tmp_path / "a.toml", force=False)
    with pytest.raises(InputError, match=r"a\.toml"):
        check_new(tmp_path / "a", force=False)
    (tmp_path / "a.toml").touch()
    check_new(tmp_path / "a.toml", force=True)
    with pytest.raises(InputError, match="--force"):
        check_new(tmp_path / "a.toml", force=False)


def test_a_stand_in_widens_the_range_of_a_whole_models_step() -> None:
    job = TrainingJob(
        decoder=named_model("olmoe").decoder, world_size=32, global_batch=256, length=2048
    )
    request = TrainingRequest(
        job=job, pins=LayoutRequest(tp=1, pp=1, micro_batch=1), target=find_target("moetune")
    )
    known = load_profile_file(bundled_profiles()["h100-x8"])
    same = describe(replace(OURS, nics=8)).profile
    other = describe(replace(OTHER, nics=8, base="h100-x8", tflops="989TFLOP/s")).profile
    plans = [plan_training(request, one) for one in (known, same, other)]
    widths = [one.confidence.p95_step_seconds / one.confidence.p05_step_seconds for one in plans]
    assert widths[0] < widths[1] < widths[2]
