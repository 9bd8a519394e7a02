"""When a transaction is run again: faults in a row, and the time that all tries may take."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from moetune.domain.errors import MoetuneError
from moetune.store.address import parse_address
from moetune.store.database import Database


def lost() -> OperationalError:
    """The server went away in the middle."""
    error = psycopg.OperationalError("server closed the connection unexpectedly")
    return OperationalError("SELECT 1", {}, error, connection_invalidated=True)


def refused() -> OperationalError:
    """Nothing listens: while it connects, the driver knows no code."""
    return OperationalError("SELECT 1", {}, psycopg.OperationalError("Connection refused"))


class Failing:
    """Work that meets these faults, one a try, and then succeeds."""

    def __init__(self, *faults: Callable[[], OperationalError]) -> None:
        self.num_tries = 0
        self._faults = faults

    def __call__(self, _: Connection) -> str:
        self.num_tries += 1
        if self.num_tries <= len(self._faults):
            fault = self._faults[self.num_tries - 1]
            raise fault()
        return "done"


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with closing(Database.connect(parse_address(f"sqlite:///{tmp_path}/moetune.db"))) as opened:
        yield opened


def test_a_server_that_restarts_is_tried_until_it_is_there(
    database: Database, pauses: list[float]
) -> None:
    work = Failing(lost, refused, refused)
    assert database.write(work) == "done"
    assert work.num_tries == 4
    assert len(pauses) == 3
    assert pauses == sorted(set(pauses))


def test_a_server_that_was_never_there_is_not_tried_again(
    database: Database, pauses: list[float]
) -> None:
    work = Failing(refused, refused)
    with pytest.raises(MoetuneError):
        database.write(work)
    assert (work.num_tries, pauses) == (1, [])


@pytest.mark.usefixtures("pauses")
def test_what_has_taken_its_time_is_not_tried_again(tmp_path: Path) -> None:
    address = parse_address(f"sqlite:///{tmp_path}/moetune.db")
    with closing(Database.connect(address, patience_seconds=0.0)) as impatient:
        work = Failing(lost, lost)
        with pytest.raises(MoetuneError):
            impatient.write(work)
    assert work.num_tries == 1
