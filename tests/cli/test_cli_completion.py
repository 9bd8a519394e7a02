"""Completions as shells ask for them, and the scripts that make them ask."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moetune.cli import app
from tests.cli.running import Cli, Result

PLAN = ("plan", "--model", "tm-1", "--profile", "rtx2080ti-x64")


@pytest.fixture
def complete(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Ask as bash does: words of a line, the last of which is completed."""

    def ask(*words: str) -> Result:
        with monkeypatch.context() as asked:
            asked.setenv("_MOETUNE_COMPLETE", "complete_bash")
            asked.setenv("COMP_WORDS", "\n".join(("moetune", *words)))
            asked.setenv("COMP_CWORD", str(len(words)))
            return cli()

    return ask


def test_commands_and_flags(complete: Cli) -> None:
    assert complete("pl").out.split() == ["plan", "plans"]
    assert complete("plans", "re").out.split() == ["remove"]
    assert complete("plan", "--memory").out.split() == ["--memory-limit", "--memory-taken"]
    assert complete("plan", "--strategy", "S").out.split() == ["S1", "S2", "S3", "S4"]


@pytest.mark.parametrize(
    "before", [("plan", "--model"), ("profile", "--model"), ("memory",), ("models", "show")]
)
def test_models_of_the_papers_and_of_hugging_face(complete: Cli, before: tuple[str, ...]) -> None:
    assert {"gpt-xl", "gpt-oss-20b"} <= {*complete(*before, "gpt").out.split()}


def test_profiles_of_the_store_come_before_the_references(complete: Cli, cli: Cli) -> None:
    references = ["h100-96gb-x8", "h100-x8", "h100-x8-efa"]
    assert complete("plan", "--profile", "h100").out.split() == references
    assert complete("profiles", "remove", "").out == "\n"
    Path("lab.toml").write_text(cli("profiles", "export", "h100-x8").out, encoding="utf-8")
    assert cli("profiles", "import", "lab.toml", "--name", "h100-lab").code == 0
    names = complete("profiles", "show", "h100").out.split()
    assert names == ["h100-lab", *references]
    assert complete("profiles", "remove", "").out.split() == ["h100-lab"]


def test_plans_by_the_beginning_of_their_ids(complete: Cli, cli: Cli, home: Path) -> None:
    plan = cli(*PLAN, "--json").document["id"]
    other = str(home / "other.db")
    for command in (("explain",), ("plans", "remove"), ("report", "--plan")):
        assert complete(*command, plan[:2]).out.split() == [plan[:8]]
        assert complete("--db", other, *command, plan[:2]).out.split() == []
    assert complete("explain", plan[:10]).out.split() == [plan]
    assert not Path(other).exists()


def test_nothing_is_said_where_store_or_settings_are_broken(complete: Cli, home: Path) -> None:
    broken = home / "broken.db"
    broken.write_bytes(b"no database" * 100)
    result = complete("--db", str(broken), "plan", "--profile", "h100-x8-")
    assert (result.out.split(), result.err) == (["h100-x8-efa"], "")
    Path("moetune.toml").write_text("max_degree = 'many", encoding="utf-8")
    result = complete("explain", "")
    assert (result.out.strip(), result.err) == ("", "")


def test_an_unknown_shell_is_refused_with_those_that_are_known(cli: Cli) -> None:
    result = cli("completion", "tcsh")
    assert result.code == 2
    assert all(shell in result.err for shell in ("bash", "zsh", "fish"))


ASK = {
    "bash": """
        source <(moetune completion bash)
        COMP_WORDS=(moetune plan --profile h100) COMP_CWORD=3
        _moetune_completion moetune
        printf '%s\\n' "${COMPREPLY[@]}"
    """,
    "fish": "moetune completion fish | source; complete -C 'moetune plan --profile h100'",
    "zsh": r"""
        zmodload zsh/zpty  # it completes on a terminal alone, where Ctrl-D lists what there is
        zpty -b typed zsh -f -i
        zpty -w typed 'autoload -Uz compinit; compinit -u -D; source <(moetune completion zsh)'
        zpty -w typed 'PROMPT= RPROMPT=; print -r -- "is ""ready"'
        zpty -r typed before '*is ready*'
        zpty -n -w typed $'moetune plan --profile h100\C-d'
        zpty -r typed found '*h100-x8-efa*'
        print -r -- ${found##*$'\n'}
    """,
}


@pytest.mark.parametrize("shell", sorted(ASK))
def test_a_real_shell_completes(tmp_path: Path, shell: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    command = tmp_path / "moetune"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m moetune "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    done = subprocess.run(
        (program, "-c", ASK[shell]),
        env={"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.defpath}", "TERM": "dumb",
             "PYTHONPATH": str(Path(app.__file__).resolve().parents[2])},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["h100-96gb-x8", "h100-x8", "h100-x8-efa"]
