"""`moetune profiles new`: flags, and nothing written where it fails."""

from pathlib import Path

import pytest

from moetune.app.files import load_profile_file
from tests.cli.running import Cli

FLAGS = ("--gpu", "h100", "--gpus-per-node", "8", "--nodes", "8", "--nics", "8", "--nic-rate",
         "400Gbit/s")  # fmt: skip


def test_a_described_machine_is_planned_with_by_the_printed_command(cli: Cli) -> None:
    for nodes in ("8", "3"):  # 64 experts divide by 64 ranks, not by 24
        flags = [nodes if flag == "8" and FLAGS[at - 1] == "--nodes" else flag
                 for at, flag in enumerate(FLAGS)]  # fmt: skip
        result = cli("profiles", "new", "my cluster.toml", *flags, "--force")
        assert result.code == 0
        (command,) = (line for line in result.err.splitlines() if "moetune plan" in line)
        words = command.replace("'my cluster.toml'", "my\tcluster.toml").split(" ")
        start = words.index("moetune") + 1
        plan = cli(*(word.replace("\t", " ") for word in words[start:]), "--json")
        assert plan.code == 0
        assert plan.document["inputs"]["profile"] == "my cluster"
        assert plan.document["inputs"]["world_size"] == 8 * int(nodes)


def test_json_has_the_file_its_base_and_what_stands_in(cli: Cli) -> None:
    document = cli("profiles", "new", "a.toml", *FLAGS, "--name", "ours", "--json").document
    stand_ins = document.pop("stand_ins")
    assert document == {
        "schema": "moetune.profiles.new/1", "name": "ours", "file": "a.toml", "base": "h100-x8",
    }  # fmt: skip
    text = Path("a.toml").read_text(encoding="utf-8")
    assert all(f"# - {stand_in}\n" in text for stand_in in stand_ins)


def test_what_is_missing_is_named(cli: Cli) -> None:
    result = cli("profiles", "new", "a.toml", "--gpu", "h100")
    assert result.code == 2
    assert "--gpus-per-node" in result.err
    result = cli("profiles", "new", "a.toml", *FLAGS[:6])
    assert "--nics and --nic-rate" in result.err
    assert not list(Path().iterdir())


@pytest.mark.parametrize(("flags", "words"), [
    (("--nic-rate", "400"), "--nic-rate: rate '400' has no unit"),
    (("--memory", "80000000000"), "--memory: size '80000000000' has no unit"),
    (("--gpu", "l20"), "known: a100"),
])  # fmt: skip
def test_a_wrong_flag_is_an_error_and_no_file(cli: Cli, flags: tuple[str, str], words: str) -> None:
    result = cli("profiles", "new", "a.toml", *FLAGS, *flags)
    assert result.code == 2
    assert words in result.err
    assert "Traceback" not in result.err
    assert not list(Path().iterdir())


def test_a_file_is_replaced_only_when_asked(cli: Cli) -> None:
    Path("a.toml").write_text("mine", encoding="utf-8")
    assert cli("profiles", "new", "a.toml", *FLAGS).code == 2
    assert Path("a.toml").read_text(encoding="utf-8") == "mine"
    assert cli("profiles", "new", "a.toml", *FLAGS, "--force").code == 0
    assert load_profile_file(Path("a.toml")).machine.num_devices == 64
    assert cli("profiles", "new", "no/a.toml", *FLAGS).code == 2
    assert cli("profiles", "new", "a", *FLAGS).code == 2
    assert [file.name for file in Path().iterdir()] == ["a.toml"]


LAYER = ("--model", "gpt-s", "--profile", "h100-x8")
SIZES = (
    ("plan", *LAYER, "--memory-limit"),
    ("plan", *LAYER, "--memory-taken"),
    ("memory", "olmoe", "--device-memory"),
    ("whatif", "plan.json", "--profile", "h100-x8", "--memory-limit"),
    ("serve", "--max-body"),
)


@pytest.mark.parametrize("command", SIZES, ids=lambda command: f"{command[0]}{command[-1]}")
def test_a_bare_size_is_refused_on_every_flag(cli: Cli, command: tuple[str, ...]) -> None:
    if command[0] == "whatif":
        cli("plan", *LAYER, "--output", "plan.json")
    for text in ("80000000000", "80"):
        result = cli(*command, text)
        assert result.code == 2
        assert f"{command[-1]}: size '{text}' has no unit" in result.err
        assert f"{text}B" in result.err


@pytest.mark.parametrize("size", ["80G", "80GB", "80GiB"])
def test_sizes_and_short_dtypes_are_understood_by_every_command(cli: Cli, size: str) -> None:
    num_bytes = 80 * (2**30 if size.endswith("iB") else 10**9)
    plan = cli("plan", *LAYER, "--memory-limit", size, "--dtype", "bf16", "--json").document
    assert plan["inputs"]["memory_limit_bytes"] == num_bytes
    assert plan["inputs"]["dtype"] == "bfloat16"
    changed = cli("whatif", plan["id"], "--memory-limit", size.replace("80", "70"), "--dtype",
                  "bf16", "--json").document  # fmt: skip
    assert changed["after"]["inputs"]["memory_limit_bytes"] == num_bytes * 7 // 8
    assert changed["after"]["inputs"]["dtype"] == "bfloat16"
    memory = cli("memory", "olmoe", "--device-memory", size, "--dtype", "bf16")
    assert memory.code == 0
    half = cli(
        "plan", "--model", "gpt-s", "--profile", "rtx2080ti-x64", "--dtype", "fp16", "--json"
    )
    assert half.document["inputs"]["dtype"] == "float16"
