"""`moetune serve` as a process: how it starts, refuses, logs, stops and is killed."""

import json
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.cli import app as program
from moetune.domain.document import encode
from tests.documents import read_document
from tests.service.asking import SMALL, Served, command, environment, served

TOKEN = "write-token-0123456789"  # noqa: S105 - of a service that lives for a second


def _run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), env=environment(home), cwd=home, capture_output=True,
                          text=True, check=False, timeout=240)  # fmt: skip


def _token_file(home: Path) -> Path:
    path = home / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


def test_a_service_makes_its_database_serves_and_stops_when_asked(tmp_path: Path) -> None:
    db = tmp_path / "new" / "team.db"
    with (
        served(tmp_path, db=db) as service,
        httpx.Client(base_url=service.url, timeout=120) as client,
    ):
        assert db.exists()
        assert f"(database {db})" in service.log.read_text()
        made = client.post("/v1/plans:resolve", json=SMALL)
        assert client.get(made.headers["content-location"]).content == made.content
        assert "server" not in made.headers
        assert service.stop() == 0
    assert "Traceback" not in service.log.read_text()
    assert not db.with_name("team.db-wal").exists()


def test_what_is_being_answered_is_answered_before_the_end(tmp_path: Path) -> None:
    slow = json.dumps(SMALL).encode()
    with served(tmp_path) as service:
        address = service.url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1])), timeout=120) as connection:
            connection.sendall(
                b"POST /v1/plans:resolve HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\n"
                + f"Content-Length: {len(slow)}\r\n\r\n".encode()
                + slow[:10]
            )
            httpx.get(f"{service.url}/healthz", timeout=120)
            service.process.send_signal(signal.SIGTERM)
            connection.sendall(slow[10:])
            answer = connection.makefile("rb").read()
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert service.process.wait(timeout=120) == 0


def test_ready_as_json_is_one_document_and_the_interrupt_key_ends_with_130(tmp_path: Path) -> None:
    with subprocess.Popen(
        command("serve", "--port", "0", "--json"), env=environment(tmp_path), cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "}\n")
        document = read_document("".join(lines) + "}")
        assert document["schema"] == "moetune.serve/1"
        assert httpx.get(f"{document['url']}/healthz", timeout=120).status_code == 200
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err


def test_the_log_has_a_line_for_each_request_and_no_token(tmp_path: Path) -> None:
    token = _token_file(tmp_path)
    arguments = ("--write-token-file", str(token), "--log-format", "json")
    with (
        served(tmp_path, *arguments) as service,
        httpx.Client(base_url=service.url, timeout=120) as client,
    ):
        headers = {"Authorization": f"Bearer {TOKEN}", "X-Request-ID": "job-7"}
        client.get("/v1/plans?token=a-secret-of-the-query", headers=headers)
        client.post("/v1/plans:resolve", json=SMALL)
        service.stop()
    requests = [line for line in service.lines if line["message"] == "request"]
    assert [(request["path"], request["status"]) for request in requests] == [
        ("/v1/plans", 200), ("/v1/plans:resolve", 401),
    ]  # fmt: skip
    assert requests[0]["request_id"] == "job-7"
    assert requests[0]["seconds"] > 0
    text = service.log.read_text()
    assert TOKEN not in text
    assert "a-secret-of-the-query" not in text


def test_a_port_in_use_is_bad_input_that_names_it(tmp_path: Path) -> None:
    with closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = _run(tmp_path, "serve", "--port", str(port))
    assert done.returncode == 2
    assert f"127.0.0.1 port {port}: Address already in use" in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("arguments", "names"), [
    (("--host", "0.0.0.0"), "no token is set"),  # noqa: S104 - it is refused
    (("--host", "192.0.2.1", "--write-token-file", "token"), "cannot listen on 192.0.2.1"),
    (("--host", "no.such.host.invalid"), "no.such.host.invalid"),
])  # fmt: skip
def test_a_start_that_cannot_be_is_bad_input(
    tmp_path: Path, arguments: tuple[str, ...], names: str,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    _token_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    db = tmp_path / "moetune.db"
    code = program.main(("--no-config", "--db", str(db), "serve", "--port", "0", *arguments))
    assert code == 2
    assert names in capfd.readouterr().err
    assert not db.exists()


def test_a_database_of_a_newer_schema_ends_with_7(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    db = tmp_path / "moetune.db"
    assert program.main(("--no-config", "--db", str(db), "db", "upgrade")) == 0
    with closing(sqlite3.connect(db)) as connection, connection:
        connection.execute("UPDATE moetune_revision SET version_num = '9999'")
    assert program.main(("--no-config", "--db", str(db), "serve", "--port", "0")) == 7
    assert "newer moetune" in capfd.readouterr().err


def test_without_fastapi_the_command_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    loaded = [name for name in sys.modules if name.startswith("moetune.service")]
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
    # None makes an import fail as that of a module which is not there.
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.delattr("moetune.service", raising=False)
    monkeypatch.chdir(tmp_path)
    assert program.main(("--no-config", "serve")) == 1
    assert "pip install 'moetune[serve]'" in capfd.readouterr().err


def test_what_was_acknowledged_outlives_a_kill_under_load(tmp_path: Path) -> None:
    db = tmp_path / "moetune.db"
    kept: list[str] = []
    with served(tmp_path, db=db) as service:
        threads = [
            threading.Thread(target=_write_until_gone, args=(service, name, kept)) for name in "abc"
        ]
        for thread in threads:
            thread.start()
        while len(kept) < 60 and any(thread.is_alive() for thread in threads):
            threads[0].join(timeout=0.01)
        service.process.kill()
        for thread in threads:
            thread.join(timeout=120)
    with (
        served(tmp_path, db=db) as service,
        httpx.Client(base_url=service.url, timeout=120) as client,
    ):
        stored = [row["name"] for row in client.get("/v1/profiles").json()["items"]]
        assert client.get("/readyz").status_code == 200
    assert len(kept) >= 60
    assert set(kept) <= set(stored)
    assert len(stored) == len(set(stored))


def _write_until_gone(service: Served, name: str, kept: list[str]) -> None:
    """Send profiles, and note those that the service has acknowledged."""
    profile = load_profile_file(bundled_profiles()["rtx2080ti-x64"])
    with httpx.Client(base_url=service.url, timeout=120) as client:
        for number in range(10_000):
            sent = replace(profile, name=f"{name}{number}")
            try:
                answer = client.post("/v1/profiles", json=encode(sent))
            except httpx.TransportError:
                return
            assert answer.status_code == 201
            kept.append(sent.name)


@pytest.mark.parametrize("flags", [("--tls-key",), ("--tls-cert", "--tls-key")])
def test_tls_files_that_uvicorn_cannot_read_are_bad_input(
    tmp_path: Path, flags: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    words = [word for flag in flags for word in (flag, str(_token_file(tmp_path)))]
    db = str(tmp_path / "moetune.db")
    assert program.main(("--no-config", "--db", db, "serve", "--port", "0", *words)) == 2
    assert "TLS cannot be served" in capfd.readouterr().err


def test_tls_by_flag(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(cert)),
        check=True, capture_output=True, timeout=240,
    )  # fmt: skip
    token = str(_token_file(tmp_path))
    arguments = ("--tls-cert", str(cert), "--tls-key", str(key), "--write-token-file", token)
    with served(tmp_path, *arguments) as service:
        assert service.url.startswith("https://")
        trust = ssl.create_default_context(cafile=str(cert))
        assert httpx.get(f"{service.url}/healthz", verify=trust, timeout=120).status_code == 200
        entered = httpx.post(
            f"{service.url}/login", data={"token": TOKEN}, verify=trust, timeout=120
        )
        assert "Secure" in entered.headers["set-cookie"]
        with pytest.raises(httpx.TransportError):  # limits on requests hold behind it
            httpx.get(service.url, headers={"X-Long": "a" * 2**20}, verify=trust, timeout=120)
        assert httpx.get(f"{service.url}/healthz", verify=trust, timeout=120).status_code == 200
