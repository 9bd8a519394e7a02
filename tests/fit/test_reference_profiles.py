"""The shipped profiles say what the papers say."""

from pathlib import Path

import pytest

from moetune.app.files import load_profile_file
from moetune.domain.cost_keys import CollectiveKey, CopyKey, GemmKey, RowsKey
from moetune.domain.costs import seconds_if_known
from moetune.domain.samples import CollectiveOp
from moetune.domain.site import site_of
from moetune.fit.costs import costs_of
from tests.fit.measured import line_of, read

PROFILES = Path(__file__).parents[2] / "profiles"
FIG_6B = {16: (1.72e-5, 2.96e-10), 32: (2.09e-4, 3.54e-10), 64: (7.83e-4, 3.84e-10)}


@pytest.mark.parametrize("num_gpus", FIG_6B)
def test_pipemoe_profile_has_the_constants_of_figure_6(num_gpus: int) -> None:
    profile = read(f"rtx2080ti-x{num_gpus}")
    assert profile.name == f"rtx2080ti-x{num_gpus}"
    assert profile.provenance == "published"
    assert profile.citation == "PipeMoE, Fig. 6, Table III"
    assert (profile.machine.num_devices, profile.machine.devices_per_node) == (num_gpus, 4)
    assert profile.machine.memory_bytes == 11 * 2**30
    costs = costs_of(profile)
    gemm = line_of(costs, GemmKey("float32"))
    all_to_all = line_of(costs, CollectiveKey("all_to_all", num_gpus))
    assert not costs.is_measured("float32")
    assert (gemm.alpha_seconds, gemm.beta_seconds) == pytest.approx((6.19e-5, 4.1e-14))
    line = all_to_all.alpha_seconds, all_to_all.beta_seconds
    assert line == pytest.approx(FIG_6B[num_gpus])


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_profile_is_read_under_its_file_name(path: Path) -> None:
    assert load_profile_file(path).name == path.stem


def test_the_a100_profile_has_the_wires_and_the_memory_of_the_data_sheets() -> None:
    profile = read("a100-x4")
    costs = costs_of(profile)
    # PCIe 4.0 moves 31.5 GB/s; of 4 ranks' shares 3 arrive; Adam moves 30 bytes a parameter.
    copied = costs.seconds(CopyKey("h2d", pinned=True), 31.5e9)
    gathered = costs.seconds(CollectiveKey("all_gather", 4), 31.5e9 / 3)
    assert [time.seconds for time in (copied, gathered)] == pytest.approx([1, 1], rel=1e-3)
    stepped = [
        seconds_if_known(costs, RowsKey(op, "bfloat16"), 1e9) for op in ("adam", "host_adam")
    ]
    assert [time.seconds for time in stepped if time] == pytest.approx(
        [30 / 1935, 30 / 409.6], rel=0.01
    )
    assert {time.trust for time in stepped if time} == {"modelled"}
    assert costs.copy_mode == "pinned"
    assert site_of(profile).host_memory_bytes == 500e9


@pytest.mark.parametrize(("op", "group_size", "num_nodes", "num_bytes", "seconds"), [
    # Worked out by hand from 300 GB/s inside a node, 12.5 GB/s between, eight to a node.
    ("all_reduce", 8, 1, 300e9, 1.75), ("all_reduce", 32, 4, 12.5e9, 2 * 31 / 32),
    ("all_reduce", 4, 4, 12.5e9 / 8, 1.5), ("all_to_all", 32, 4, 12.5e9 / 8, 24 / 32),
    ("all_to_all", 4, 4, 12.5e9 / 8, 3 / 4), ("all_gather", 8, 1, 300e9, 7),
    ("send", 2, 2, 12.5e9 / 8, 1), ("send", 16, 2, 12.5e9, 1),
])  # fmt: skip
def test_the_v100_profile_has_the_wires_of_the_paper(
    op: CollectiveOp, group_size: int, num_nodes: int, num_bytes: float, seconds: float
) -> None:
    time = costs_of(read("v100-x256")).seconds(CollectiveKey(op, group_size, num_nodes), num_bytes)
    assert time.seconds == pytest.approx(seconds + 6.19e-5, rel=1e-5)
