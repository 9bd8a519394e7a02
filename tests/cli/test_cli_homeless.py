"""A user without a home folder, and stores that cannot be used: files are read and written."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import XL, Cli

_LAYER = ("plan", *XL)
_MODEL = ("plan", "--model", "qwen3-30b-a3b", "--profile", "h100-x8", "--global-batch", "256",
          "--seq", "4096")  # fmt: skip


@pytest.fixture
def homeless(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command line of a user without HOME and without an entry of the password file."""

    def unknown(_: object) -> object:
        raise KeyError("uid not found")

    for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert os.path.expanduser("~") == "~"  # noqa: PTH111 - raises nothing
    return cli


def test_a_named_store_and_plan_files_need_no_home(homeless: Cli) -> None:
    result = homeless("--db", "named.db", *_LAYER, "--output", "plan.json")
    assert (result.code, "warning" in result.err) == (0, False), result.err
    assert "saved. Explain it" in result.out
    for command in (("explain", "plan.json"), ("--db", "named.db", "plans", "list"), ("doctor",)):
        assert homeless(*command).code == 0, command
    shown = homeless("plans", "list")
    assert (shown.code, "No plan matches" in shown.out + shown.err) == (0, True)


@pytest.mark.parametrize("flags", [_LAYER, _MODEL])
def test_without_a_home_plans_are_written_warning(homeless: Cli, flags: tuple[str, ...]) -> None:
    result = homeless(*flags, "--output", "plan.json")
    assert result.code == 0, result.err
    assert "warning: the plan is not saved in the store: this user has no home" in result.err
    assert "is written to plan.json" in result.err
    assert Path("plan.json").stat().st_size
    refused = homeless(*flags)
    assert refused.code == 2
    assert "set HOME, or name a database with --db" in refused.err
    assert not list(Path.cwd().glob("(none)*"))


@pytest.mark.parametrize("flags", [_LAYER, _MODEL])
def test_a_failing_store_loses_no_plan(cli: Cli, tmp_path: Path, flags: tuple[str, ...]) -> None:
    (tmp_path / "text.db").write_text("no database")
    (tmp_path / "file").touch()
    for number, store in enumerate(("text.db", "file/moetune.db")):
        name = f"{number}.json"
        result = cli("--db", str(tmp_path / store), *flags, "--output", name)
        assert result.code == 0, result.err
        assert "warning: the plan is not saved in the store: " in result.err
        assert Path(name).stat().st_size
        assert cli("--db", str(tmp_path / store), *flags).code == 2


def test_a_profile_of_a_store_that_cannot_be_read_is_missed(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("no database")
    flags = ("plan", "--model", "gpt-xl", "--profile", "lab", "--dtype", "float16")
    result = cli("--db", str(tmp_path / "text.db"), *flags, "--output", "plan.json")
    assert result.code != 0
    assert not Path("plan.json").exists()


def test_a_folder_with_an_umlaut_holds_a_store_where_texts_are_ascii(tmp_path: Path) -> None:
    folder = tmp_path / "Möbel"
    folder.mkdir()
    ascii_only = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environ = os.environ | ascii_only | {"HOME": str(folder)}
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        environ.pop(name, None)
    printed = b""
    for command in ((*_LAYER, "--output", str(folder / "plan.json")), ("plans", "list")):
        run = (sys.executable, "-m", "moetune", *command)
        process = subprocess.run(run, env=environ, cwd=folder, capture_output=True, check=True)
        assert b"warning" not in process.stderr
        printed = process.stdout
    assert b"gpt-xl" in printed
    assert (folder / ".local" / "share" / "moetune" / "moetune.db").exists()
