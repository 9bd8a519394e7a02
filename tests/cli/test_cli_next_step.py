"""The command after a plan works where it is printed."""

import json
import os
import re
from pathlib import Path

import pytest

from moetune.cli.next_step import num_devices
from tests.cli.running import Cli
from tests.huggingface.configs import QWEN3

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, 2), ("", CORES), ("1", 1), ("0,1", 2), ("0,1,2,3", 2)]
)
def test_devices_are_counted_without_a_driver(
    tmp_path: Path, visible: str | None, expected: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert num_devices(visible, tmp_path) == expected
    assert num_devices(None, tmp_path / "none") == CORES


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 0), (1024, 128)])
def test_verify_is_for_here_where_there_is_room(cli: Cli, ranks: int, nodes: int) -> None:
    said = cli(
        "plan", "--d-model", "256", "--d-hidden", "1024", "--num-experts", str(ranks),
        "--tokens", "1k", "--world-size", str(ranks), "--profile", "h100-x8", "--dtype", "bfloat16",
    ).out  # fmt: skip
    here = re.search(r"Verify it on this machine: moetune verify [0-9a-f]{6}\n", said)
    there = re.search(rf"on its {ranks} ranks.*\n.*--nnodes (\d+) --nproc-per-node 8 ", said)
    assert (here is None) == bool(nodes)
    assert int(there[1] if there else 0) == nodes


def test_the_next_steps_of_a_configurations_plan_work_from_any_folder(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "configs"
    folder.mkdir()
    vision = {"model_type": "qwen3_vl_moe", "text_config": QWEN3, "vision_config": {"depth": 27}}
    (folder / "ours.json").write_text(json.dumps(vision), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    asked = ("--profile", "h100-x8", "--world-size", "8", "--global-batch", "64", "--seq", "512")
    said = cli("plan", "--model", "configs/ours.json", *asked, "--target", "megatron").out
    assert "Training ours · 8 ranks" in said
    assert "The vision tower is not counted" in said
    steps = [found.split() for found in re.findall(r"moetune ((?:explain|export) .*)", said)]
    assert [step[0] for step in steps] == ["explain", "export"]
    monkeypatch.chdir("/")
    for step in (*steps, [*steps[0], "--layout", "ep=4"]):
        assert cli(*step).code == 0, step
    moved = folder.rename(tmp_path / "moved") / "ours.json"
    lost = cli(*steps[1])
    assert lost.code == 2
    assert "configs/ours.json" in lost.err.replace("\n", "")
    assert "--model" in lost.err
    assert cli(*steps[1], "--model", str(moved)).code == 0
