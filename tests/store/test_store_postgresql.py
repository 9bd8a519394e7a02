"""What only a server can do: refuse, vanish, conflict. And no password in any text."""

import sys
import traceback
from typing import Any

import pytest
from sqlalchemy import URL, Connection, event, text

from moetune.domain.errors import MoetuneError
from moetune.store import check, current, open_store, upgrade
from moetune.store.address import parse_address
from moetune.store.database import Database
from tests.store.values import CLUSTER

END_THE_OTHERS = text(
    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
)


def shown(url: URL) -> str:
    return url.render_as_string(hide_password=False)


def without_password(url: URL) -> URL:
    return URL.create(
        url.drivername, url.username, host=url.host, port=url.port, database=url.database
    )


def refusal(url: URL) -> MoetuneError:
    """Return the one error of every way to open it, which tells no password."""
    errors = []
    for use in (open_store, current, check, upgrade):
        with pytest.raises(MoetuneError) as caught:
            use(shown(url))
        errors.append(caught.value)
        if url.password:
            assert str(url.password) not in "".join(traceback.format_exception(caught.value))
    assert len({(type(error), error.hint) for error in errors}) == 1
    return errors[0]


def test_a_right_password_opens_and_is_shown_nowhere(network_url: URL) -> None:
    with open_store(shown(network_url)) as store:
        assert store.location == shown(without_password(network_url))
        assert str(network_url.password) not in repr(store)
    assert check(shown(network_url)) == ()


def test_a_password_among_the_options_is_shown_nowhere(network_url: URL) -> None:
    moved = without_password(network_url).set(query={"password": str(network_url.password)})
    with open_store(shown(moved)) as store:
        assert store.location == shown(without_password(network_url))
    with pytest.raises(MoetuneError) as caught:
        open_store(shown(moved.set(query={"password": "guess-word"})))
    assert "guess-word" not in str(caught.value)


@pytest.mark.parametrize(("change", "exit_code", "what", "hint"), [
    ({"password": "guess-word"}, 1, "refuses this user or password", "check the user"),
    ({"database": "absent"}, 2, "does not exist", "createdb"),
    ({"port": 1}, 1, "cannot be reached", "check that the server runs"),
])  # fmt: skip
def test_what_refuses_at_the_door_is_said_with_its_place(
    network_url: URL, change: dict[str, Any], exit_code: int, what: str, hint: str
) -> None:
    url = network_url.set(**change)
    error = refusal(url)
    assert error.exit_code == exit_code
    assert what in error.what
    assert f"127.0.0.1:{url.port}" in error.what
    assert hint in error.hint


def test_a_user_without_rights_is_refused(network_url: URL, socket_url: str) -> None:
    with Database(parse_address(socket_url)) as owner:
        owner.write(lambda c: c.execute(text("DROP ROLE IF EXISTS guest")))
        owner.write(lambda c: c.execute(text("CREATE ROLE guest LOGIN PASSWORD 'guest-word'")))
    guest = network_url.set(username="guest", password="guest-word")  # noqa: S106 - made here
    with pytest.raises(MoetuneError, match="does not allow this user"):
        open_store(shown(guest))
    open_store(shown(network_url)).close()
    with pytest.raises(MoetuneError, match="does not allow this user"):
        open_store(shown(guest))


def test_without_the_driver_its_installation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(MoetuneError) as caught:
        open_store("postgresql+psycopg://user:guess-word@host/db")
    assert "pip install 'moetune[postgres]'" in caught.value.hint
    assert "guess-word" not in str(caught.value)


def test_a_lost_connection_is_made_again(socket_url: str) -> None:
    with open_store(socket_url) as store:
        for _ in range(3):
            with Database(parse_address(socket_url)) as other:
                other.write(lambda connection: connection.execute(END_THE_OTHERS))
            store.start_run(name="h200", cluster=CLUSTER, preset="quick")
        assert len(store.runs()) == 3


def test_a_connection_lost_at_the_commit_is_not_tried_again_but_open(socket_url: str) -> None:
    with open_store(socket_url) as store:
        commits = []

        @event.listens_for(store.engine, "commit")
        def lose(_connection: Connection) -> None:
            commits.append(1)
            with Database(parse_address(socket_url)) as other:
                other.read(lambda connection: connection.execute(END_THE_OTHERS))

        with pytest.raises(MoetuneError, match="it may or may not be stored"):
            store.start_run(name="h200", cluster=CLUSTER, preset="quick")
        assert len(commits) == 1
    with open_store(socket_url) as store:
        assert store.runs() == ()


@pytest.mark.parametrize("sqlstate", ["40001", "40P01"])
@pytest.mark.parametrize(("failures", "succeeds"), [(1, True), (2, False)])
def test_conflicts_are_tried_again_once(
    socket_url: str,
    sqlstate: str,
    failures: int,
    succeeds: bool,  # noqa: FBT001 - a case
) -> None:
    attempts = []

    def work(connection: Connection) -> int:
        attempts.append(1)
        connection.execute(text("CREATE TABLE attempted (id INTEGER)"))
        if len(attempts) <= failures:
            connection.execute(
                text(f"DO $$ BEGIN RAISE EXCEPTION 'clash' USING ERRCODE = '{sqlstate}'; END $$")
            )
        return len(attempts)

    with Database(parse_address(socket_url)) as opened:
        if succeeds:
            assert opened.write(work) == 2
        else:
            with pytest.raises(MoetuneError, match="clash"):
                opened.write(work)
    assert len(attempts) == 2


@pytest.mark.parametrize(("sqlstate", "part"), [
    ("53100", "no space left; nothing was written"), ("25006", "is read-only"),
    ("53300", "too many connections"), ("55P03", "stayed locked"),
    ("22001", "cannot hold this value"), ("XX000", "failed"),
])  # fmt: skip
def test_errors_of_a_server_are_not_tried_again(socket_url: str, sqlstate: str, part: str) -> None:
    attempts = []

    def work(connection: Connection) -> None:
        attempts.append(1)
        connection.execute(
            text(f"DO $$ BEGIN RAISE EXCEPTION 'clash' USING ERRCODE = '{sqlstate}'; END $$")
        )

    with Database(parse_address(socket_url)) as opened:
        with pytest.raises(MoetuneError, match=part) as caught:
            opened.write(work)
        assert caught.value.hint
    assert len(attempts) == 1
