import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moetune.app.planner import ServicePlanner, open_planner
from moetune.config import Settings
from moetune.service.access import Access
from moetune.service.app import create_app
from tests.service.asking import READ, SMALL, WRITE, Client, client_of


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new database, to be copied: to make one takes longer than most tests."""
    path = tmp_path_factory.mktemp("service") / "empty.db"
    with open_planner(Settings(db=str(path))):
        pass
    return path


@pytest.fixture
def database(tmp_path: Path, empty_database: Path) -> Path:
    return Path(shutil.copy(empty_database, tmp_path / "moetune.db"))


@pytest.fixture
def planner(database: Path) -> Iterator[ServicePlanner]:
    with open_planner(Settings(db=str(database))) as opened:
        yield opened


@pytest.fixture
def client(planner: ServicePlanner) -> Iterator[Client]:
    """Asks a service that wants no token."""
    with client_of(create_app(planner, Access(max_body_bytes=64 * 1024))) as made:
        yield made


@pytest.fixture
def guarded(planner: ServicePlanner) -> Iterator[Client]:
    """Asks a service that wants a token."""
    with client_of(create_app(planner, Access(read_token=READ, write_token=WRITE))) as made:
        yield made


@pytest.fixture(scope="session")
def steady_planner(
    tmp_path_factory: pytest.TempPathFactory, empty_database: Path
) -> Iterator[ServicePlanner]:
    """A planner for requests of which nothing is kept."""
    copy = shutil.copy(empty_database, tmp_path_factory.mktemp("steady") / "moetune.db")
    with open_planner(Settings(db=str(copy))) as opened:
        yield opened
        assert not opened.reading.plans()
        assert not opened.reading.runs()


@pytest.fixture(scope="session")
def steady(steady_planner: ServicePlanner) -> Iterator[Client]:
    """Asks a service that wants no token, and of which nothing is kept."""
    with client_of(create_app(steady_planner, Access(max_body_bytes=64 * 1024))) as made:
        yield made


@pytest.fixture(scope="session")
def steady_guarded(steady_planner: ServicePlanner) -> Iterator[Client]:
    """Asks a service that wants a token, and of which nothing is kept."""
    with client_of(create_app(steady_planner, Access(read_token=READ, write_token=WRITE))) as made:
        yield made


@pytest.fixture
def inputs() -> dict[str, Any]:
    return SMALL
