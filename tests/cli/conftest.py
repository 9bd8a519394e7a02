import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from moetune.cli import app
from moetune.config import Settings
from tests.cli.running import Cli, Planned, Result


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


@pytest.fixture(scope="session")
def known_plans() -> dict[tuple[str, ...], str]:
    """Plans that tests have asked for, by their flags: most are asked for again."""
    return {}


@pytest.fixture
def planned(cli: Cli, known_plans: dict[tuple[str, ...], str]) -> Planned:
    def write(file: str, *flags: str) -> dict[str, Any]:
        if flags not in known_plans:
            result = cli("plan", *flags, "--no-save", "--output", file)
            assert result.code == 0, result.err
            known_plans[flags] = Path(file).read_text(encoding="utf-8")
        Path(file).write_text(known_plans[flags], encoding="utf-8")
        document = json.loads(known_plans[flags])
        assert isinstance(document, dict)
        return document

    return write
