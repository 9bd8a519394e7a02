"""The shipped profiles say what the papers say."""

import tomllib
from pathlib import Path

import pytest

from moetune.domain.profile import Profile, profile_from_document
from moetune.fit.costs import costs_of

PROFILES = Path(__file__).parents[2] / "profiles"
FIG_6B = {16: (1.72e-5, 2.96e-10), 32: (2.09e-4, 3.54e-10), 64: (7.83e-4, 3.84e-10)}


def read(name: str) -> Profile:
    return profile_from_document(tomllib.loads((PROFILES / f"{name}.toml").read_text()))


@pytest.mark.parametrize("num_gpus", FIG_6B)
def test_pipemoe_profile_has_the_constants_of_figure_6(num_gpus: int) -> None:
    profile = read(f"rtx2080ti-x{num_gpus}")

    assert profile.name == f"rtx2080ti-x{num_gpus}"
    assert profile.provenance == "published"
    assert profile.citation == "PipeMoE, Fig. 6, Table III"
    assert (profile.machine.num_devices, profile.machine.devices_per_node) == (num_gpus, 4)
    assert profile.machine.memory_bytes == 11 * 2**30
    costs = costs_of(profile)
    gemm = costs.gemm_line(dtype="float32")
    all_to_all = costs.collective_line(op="all_to_all", group_size=num_gpus)
    assert gemm is not None
    assert all_to_all is not None
    assert (gemm.alpha_seconds, gemm.beta_seconds) == (6.19e-5, 4.1e-14)
    assert (all_to_all.alpha_seconds, all_to_all.beta_seconds) == FIG_6B[num_gpus]


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_profile_is_read_under_its_own_file_name(path: Path) -> None:
    assert read(path.stem).name == path.stem
