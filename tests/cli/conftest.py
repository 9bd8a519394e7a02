from dataclasses import fields
from pathlib import Path

import pytest

from moetune.cli import app
from moetune.config import Settings
from tests.cli.running import Cli, Result


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without settings, database or launch; the working directory is in it."""
    settings = [f"MOETUNE_{item.name.upper()}" for item in fields(Settings)]
    for name in (*settings, "RANK", "WORLD_SIZE", "NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return tmp_path


@pytest.fixture
def database(home: Path) -> Path:
    """Where the default database is, or will be."""
    return home / "data" / "moetune" / "moetune.db"


@pytest.fixture
def cli(home: Path, capfd: pytest.CaptureFixture[str]) -> Cli:
    assert home.is_dir()

    def run(*arguments: str) -> Result:
        capfd.readouterr()
        code = app.main(arguments)
        out, err = capfd.readouterr()
        return Result(code=code, out=out, err=err)

    return run
