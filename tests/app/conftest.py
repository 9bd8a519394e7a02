"""What several tests of the use cases need."""

from pathlib import Path

import pytest

from moetune.app.wiring import StoreFinder
from moetune.store import open_store


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user with an empty home and no settings."""
    for name in ("MOETUNE_URL", "MOETUNE_DISABLE", "MOETUNE_DB", "MOETUNE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, folder in (("HOME", ""), ("XDG_CACHE_HOME", "cache"), ("XDG_DATA_HOME", "data"),
                         ("XDG_CONFIG_HOME", ".config")):  # fmt: skip
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def stores(tmp_path: Path) -> StoreFinder:
    path = str(tmp_path / "m.db")
    return lambda: open_store(path)
