"""Completion in a real bash, and the scripts for the other shells."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moetune.cli.completers import complete_plans, complete_profiles
from tests.cli.running import Cli

ROOT = Path(__file__).resolve().parents[2]
ASK = """
eval "$(moetune completion bash)"
COMP_WORDS=({words}) COMP_CWORD={last}
_moetune_completion moetune
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(home: Path, *words: str) -> list[str]:
    """Return what bash offers for the last word."""
    quoted = " ".join(f"'{word}'" for word in words)
    program = home / "moetune"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m moetune "$@"\n')
    program.chmod(0o755)
    environ = {
        "PATH": f"{home}:{os.environ['PATH']}", "HOME": str(home), "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    done = subprocess.run(
        ("bash", "-c", ASK.format(words=quoted, last=len(words) - 1)), env=environ,
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("moetune", "prof"), {"profile", "profiles"}),
        (("moetune", "plan", "--offload-o"), {"--offload-optimizer"}),
        (("moetune", "plan", "--model", "mixtral-8x2"), {"mixtral-8x22b"}),
        (("moetune", "plan", "--profile", "h100"), {"h100-x8", "h100-x8-efa"}),
        (("moetune", "explain", ""), set()),
    ],
)
def test_bash_completes(tmp_path: Path, words: tuple[str, ...], offered: set[str]) -> None:
    assert set(completed(tmp_path, *words)) == offered


def test_names_of_the_store_complete_and_a_damaged_store_is_silent(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cli("plan", "--model", "gpt-s", "--profile", "rtx2080ti-x64", "--json").document
    text = cli("profiles", "export", "h100-x8").out.replace('name = "h100-x8"', 'name = "mine"')
    (tmp_path / "mine.toml").write_text(text)
    assert cli("profiles", "import", str(tmp_path / "mine.toml")).code == 0
    assert complete_plans("") == [made["id"][:6]]
    assert complete_plans(made["id"][:3]) == [made["id"][:6]]
    assert complete_profiles("mi") == ["mine"]
    broken = tmp_path / "broken.db"
    broken.write_bytes(b"no database")
    monkeypatch.setenv("MOETUNE_DB", str(broken))
    assert complete_plans("") == []
    assert "mine" not in complete_profiles("")
    assert "h100-x8" in complete_profiles("")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_script(cli: Cli, shell: str) -> None:
    script = cli("completion", shell).out
    assert f"complete_{shell}" in script
    assert json.loads(cli("completion", shell, "--json").out)["script"] == script.rstrip("\n")


def test_another_shell_is_refused_by_name(cli: Cli) -> None:
    refused = cli("completion", "csh")
    assert refused.code == 2
    assert "csh" in refused.err
