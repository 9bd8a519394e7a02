from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moetune.config import Settings
from moetune.service.access import LOOPBACK_NAMES, Access
from moetune.service.app import create_app
from moetune.workflows.desk import Desk, open_desk
from tests.service.asking import Client, client_of


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "moetune.db"


@pytest.fixture
def desk(database: Path) -> Iterator[Desk]:
    with open_desk(Settings(db=str(database))) as opened:
        yield opened


@pytest.fixture
def client(desk: Desk) -> Iterator[Client]:
    """Asks a service that wants no token."""
    with client_of(create_app(desk, Access(max_body_bytes=64 * 1024))) as made:
        yield made


@pytest.fixture
def inputs() -> dict[str, Any]:
    return {"model": "gpt-s", "profile": "rtx2080ti-x64"}


@pytest.fixture
def hosts() -> tuple[str, ...]:
    return (*LOOPBACK_NAMES, "testserver")
