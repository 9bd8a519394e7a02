"""Plans with the reference machines, and profiles that take a reference for the rest."""

import json
from pathlib import Path

import pytest

from moetune.app.files import load_profile_file, profile_to_toml
from moetune.domain.cost_keys import CollectiveKey
from moetune.fit.costs import costs_of
from moetune.hardware.detect import detect
from tests.cli.running import Cli

NODE = ("plan", "--model", "gpt-xl", "--profile", "h100-x8", "--json", "--no-save")


def test_a_plan_counts_nodes_and_says_what_is_modelled(cli: Cli) -> None:
    on_nodes = cli(*NODE, "--nodes", "8").document
    assert on_nodes == cli(*NODE, "--world-size", "64").document
    assert (on_nodes["inputs"]["world_size"], on_nodes["predicted"]["trust"]) == (64, "modelled")
    assert (
        "not measured: all_to_all of 64 ranks; the modelled rule for more ranks stands in"
        in on_nodes["warnings"]
    )
    one_node = cli(*NODE).document
    assert one_node["inputs"]["world_size"] == 8
    assert not any("all_to_all" in warning for warning in one_node["warnings"])
    assert any("published profile 'h100-x8'" in warning for warning in one_node["warnings"])
    # 8,192 tokens of 2,048 bfloat16: 32 MiB a rank, in 128 µs, twice a phase; two products of
    # 8,192 × 2,048 × 8,192 at 0.85 of 750 TFLOP/s are 0.86 ms, 15 µs behind each; an activation
    # moves 8 bytes of each of 67 million elements, at 1.85 of 3.35 TB/s.
    forward = one_node["predicted"]["sequential_forward_seconds"]
    assert forward == pytest.approx(2 * 128e-6 + 0.86e-3 + 30e-6 + 0.29e-3, rel=0.1)
    assert on_nodes["predicted"]["step_seconds"] > one_node["predicted"]["step_seconds"]


def test_a_reference_is_shown_with_its_sources_and_keeps_them_in_the_store(cli: Cli) -> None:
    shown = " ".join(cli("profiles", "show", "h800-x8").out.split())
    for words in ("Sources", "× 900/400", "50 GB/s", "over 1.75"):
        assert words in shown
    text = cli("profiles", "export", "h800-x8", "--output", "h800.toml")
    assert text.code == 0
    assert cli("profiles", "import", "h800.toml", "--name", "mine").code == 0
    stored = cli("profiles", "show", "mine", "--json").document
    assert {**stored, "name": "h800-x8"} == cli("profiles", "show", "h800-x8", "--json").document
    plans = [
        cli("plan", "--model", "gpt-xl", "--profile", name, "--json", "--no-save").document
        for name in ("mine", "h800-x8")
    ]
    assert plans[0]["predicted"] == plans[1]["predicted"]


def test_another_device_is_no_base(cli: Cli) -> None:
    result = cli("profile", "--name", "mine", "--base", "h100-x8")
    assert result.code == 2
    assert "base 'h100-x8' is of cuda NVIDIA H100 80GB HBM3, and this machine has" in result.err
    assert cli("profiles", "show", "mine").code == 5


def test_a_measurement_here_is_completed_from_a_base_of_this_device(cli: Cli) -> None:
    machine = detect(num_ranks=1).machine
    base = f"""
schema = 1
name = "four"
provenance = "published"
[machine]
kind = "cpu"
device = {json.dumps(machine.device)}
num_devices = 4
devices_per_node = 4
memory_bytes = 1000000000
[[tables]]
kind = "collective"
label = "published"
source = "a paper"
op = "all_to_all"
group_size = 4
points = [[1024, 1e-4], [1048576, 1e-3]]
[network]
source = "cards"
nic_bytes_per_second = 1e9
"""
    Path("four.toml").write_text(base, encoding="utf-8")
    layer = ("--d-model", "16", "--d-hidden", "16", "--num-experts", "8", "--dtype", "float32")
    arguments = ("profile", "--name", "mine", *layer, "--tokens", "64", "--base", "four.toml")
    measured = cli(*arguments, "--budget", "5s")
    assert measured.code == 0
    cli("profiles", "export", "mine", "--output", "mine.toml")
    profile = load_profile_file(Path("mine.toml"))
    assert profile_to_toml(profile) == Path("mine.toml").read_text(encoding="utf-8")
    assert (profile.provenance, profile.citation) == ("measured", "four for the rest")
    assert (profile.machine.num_devices, profile.machine.devices_per_node) == (1, 4)
    assert profile.samples
    for ranks in ("4", "8"):
        plan = cli("plan", *layer, "--tokens", "64", "--profile", "mine", "--world-size", ranks,
                   "--json", "--no-save").document  # fmt: skip
        assert plan["predicted"]["trust"] == "modelled"
        assert plan["warnings"]  # they name the first five operations; this one may come later
        words = "published (four: a paper)" if ranks == "4" else "the modelled rule for more ranks"
        estimate = costs_of(profile).seconds(CollectiveKey("all_to_all", int(ranks)), 65536)
        assert [doubt.stand_in for doubt in estimate.doubts] == [words]
    # A later measurement keeps what came from the base.
    assert cli(*arguments[:-2], "--budget", "1s", "--resume").code == 0
    cli("profiles", "export", "mine", "--output", "again.toml")
    assert load_profile_file(Path("again.toml")).network == profile.network
