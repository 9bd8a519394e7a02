"""The client of the plan service against a real server, with every fault that it can have."""

import errno
import json
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from moetune.domain.document import canonical_json, encode
from moetune.domain.layer import LayerShape
from moetune.runtime.plans import service
from moetune.runtime.plans.service import ServiceClient, ServiceConnection
from tests.runtime.plans import small_plan
from tests.runtime.stub_service import Exchange, Seen, serving

SHAPE = LayerShape(d_model=8, d_hidden=16, num_experts=4, top_k=2)
PLAN = small_plan(layer=SHAPE)
ASKED: Mapping[str, object] = {
    "layer": {"d_model": 8, "d_hidden": 16, "num_experts": 4, "top_k": 2},
    "world_size": 2,
    "tokens_per_rank": 40,
}
TOKEN = "read-7f3a"  # noqa: S105 - of no service
OTHER = canonical_json(small_plan(layer=SHAPE, tokens=80)).encode()
Fault = Callable[[Exchange, Seen], None]


SOON_SECONDS = 0.2
"""Of clients whose service never answers; the others wait as long as a busy machine needs."""


def client_of(
    url: str, cache: Path, token: str | None = TOKEN, *, timeout_seconds: float = 20.0
) -> ServiceClient:
    connection = ServiceConnection(url, token, timeout_seconds=timeout_seconds)
    return ServiceClient(connection, cache, pause_seconds=0.01)


def good(exchange: Exchange, _: Seen) -> None:
    exchange.plan(PLAN)


def close(_: Exchange, __: Seen) -> None:
    """Say nothing, and close the connection."""


def closed_port() -> str:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{held.getsockname()[1]}"


def edited(**changes: object) -> bytes:
    """Return the plan's file with other inputs and the old id."""
    document = encode(PLAN)
    document["inputs"] |= changes
    return json.dumps(document).encode()


def keep(cache: Path) -> None:
    """Let the plan be the last good one."""
    with serving(good) as stub:
        assert client_of(stub.url, cache).ask([ASKED])[0] == PLAN


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_inputs_are_posted_with_the_token_and_the_plan_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(good) as stub:
        assert client_of(stub.url, tmp_path / "cache").ask([ASKED])[0] == PLAN
    (seen,) = stub.seen
    assert (seen.method, seen.path) == ("POST", "/v1/plans:resolve")
    assert seen.document == ASKED
    assert seen.headers["Authorization"] == f"Bearer {TOKEN}"
    assert seen.headers["Content-Type"] == "application/json"
    (kept,) = (tmp_path / "cache").iterdir()
    assert kept.read_text() == canonical_json(PLAN)
    assert warnings_of(caplog) == []


def test_a_plan_of_an_id_is_fetched(tmp_path: Path) -> None:
    with serving(good) as stub:
        client = client_of(f"{stub.url}/moetune", tmp_path, token=None)
        assert client.ask([PLAN.id])[0] == PLAN
        assert client.ask(["f" * 64])[0] is None
    assert stub.seen[0].path == f"/moetune/v1/plans/{PLAN.id}"
    assert "Authorization" not in stub.seen[0].headers


FAULTS: dict[str, tuple[Fault, str]] = {
    "never answers": (lambda exchange, _: exchange.hang(), r"no answer.*3 tries"),
    "trickles": (lambda exchange, _: exchange.trickle(), r"no answer.*3 tries"),
    "closes": (close, r"closed connection.*3 tries"),
    "no HTTP": (
        lambda exchange, _: exchange.raw(b"SSH-2.0-x\r\n\r\n"), r"no HTTP.*SSH-2\.0.*3 tries"
    ),
    "cut off": (
        lambda exchange, _: exchange.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"),
        r"cut off, 3 tries",
    ),
    "cut chunk": (
        lambda exchange, _: exchange.raw(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\n{"
        ),
        r"IncompleteRead.*3 tries",
    ),
    "no JSON": (lambda exchange, _: exchange.reply(200, b"<html>"), "not valid JSON"),
    "no text": (lambda exchange, _: exchange.reply(200, b"\xff\xfe\x00"), "not valid JSON"),
    "no plan": (lambda exchange, _: exchange.reply(200, b"[1, 2]"), "schema"),
    "nested": (lambda exchange, _: exchange.reply(200, b"[" * 10**6), "nested too deeply"),
    "empty": (lambda exchange, _: exchange.reply(204, b""), "not valid JSON"),
    "wrong digest": (
        lambda exchange, _: exchange.reply(200, edited(tokens_per_rank=80)),
        "not the hash of inputs",
    ),
    "other inputs": (
        lambda exchange, _: exchange.reply(200, OTHER),
        "something else, tokens_per_rank differs",
    ),
    "other layer": (
        lambda exchange, _: exchange.plan(small_plan(layer=replace(SHAPE, top_k=1))),
        r"something else, layer\.top_k differs",
    ),
    "401": (lambda exchange, _: exchange.problem(401, "no token"), "401: no token"),
    "403": (lambda exchange, _: exchange.reply(403), "answers 403: Forbidden"),
    "404": (
        lambda exchange, _: exchange.problem(404, "no profile 'lab'", "measure one"),
        "404: no profile 'lab'; measure one",
    ),
    "409": (
        lambda exchange, _: exchange.problem(409, "nothing fits into\n8 GiB"),
        "409: nothing fits into 8 GiB",
    ),
    "500": (lambda exchange, _: exchange.reply(500, b"\x00oops"), "500.*3 tries"),
    "503": (lambda exchange, _: exchange.problem(503, "database is locked"), "locked, 3 tries"),
    "redirected": (
        lambda exchange, _: exchange.reply(302, Location="http://a:b@elsewhere.invalid/x"),
        r"to elsewhere\.invalid \(302\)",
    ),
    "redirected to a broken address": (
        lambda exchange, _: exchange.reply(302, Location="http://[::1"), r"elsewhere \(302\)"
    ),
}  # fmt: skip


def patience(fault: str) -> float:
    return SOON_SECONDS if fault in {"never answers", "trickles"} else 20.0


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_leads_to_the_last_good_plan_or_none_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    fault, words = FAULTS[name]
    known, unknown = f"with its plan {PLAN.id[:12]}", "NO PLAN, its layers run one chunk"
    for last, outcome in ((None, unknown), (PLAN, known)):
        if last is not None:
            keep(tmp_path)
        before = {file: file.read_bytes() for file in tmp_path.iterdir()}
        caplog.clear()
        with serving(fault) as stub:
            client = client_of(stub.url, tmp_path, timeout_seconds=patience(name))
            assert client.ask([ASKED])[0] == last
        (warning,) = warnings_of(caplog)
        assert stub.url in warning
        assert outcome in warning
        assert TOKEN not in caplog.text
        assert re.search(words, warning)
        assert len(stub.seen) == (3 if "3 tries" in warning else 1)
        assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_refusal_whose_words_never_come_leads_to_the_last_good_plan(tmp_path: Path) -> None:
    def hang_in_a_refusal(exchange: Exchange, _: Seen) -> None:
        exchange.raw(b"HTTP/1.1 409 Conflict\r\nContent-Length: 9\r\n\r\n{")
        exchange.hang()

    keep(tmp_path)
    with serving(hang_in_a_refusal) as stub:
        client = client_of(stub.url, tmp_path, timeout_seconds=SOON_SECONDS)
        assert client.ask([ASKED])[0] == PLAN


def test_a_service_that_is_not_there_leads_to_the_last_good_plan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(tmp_path)
    for url, words in (
        (closed_port(), "refused, 3 tries"),
        ("http://planner.invalid:8642", "tries"),
        (closed_port().replace("http:", "https:"), "refused, 3 tries"),
    ):
        caplog.clear()
        assert client_of(url, tmp_path).ask([ASKED])[0] == PLAN
        (warning,) = warnings_of(caplog)
        assert re.search(words, warning)
        assert "moetune serve" in warning


def test_a_thread_that_cannot_be_had_is_a_fault_like_any_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    keep(tmp_path)
    monkeypatch.setattr(threading.Thread, "start", none_left)
    assert client_of(closed_port(), tmp_path).ask([ASKED])[0] == PLAN
    assert "new thread" in warnings_of(caplog)[0]


def test_plain_http_where_tls_is_asked_for_is_a_fault_like_any_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(good) as stub:
        client = client_of(stub.url.replace("http:", "https:"), tmp_path)
        assert client.ask([ASKED])[0] is None
    assert "SSL" in warnings_of(caplog)[0]
    assert stub.seen == []


def test_an_endless_answer_is_not_read_to_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_BYTES", 1000)
    with serving(lambda exchange, _: exchange.reply(200, b" " * 10**6)) as stub:
        assert client_of(stub.url, tmp_path).ask([ASKED])[0] is None
    assert "longer than 1,000 bytes" in warnings_of(caplog)[0]
    assert len(stub.seen) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_the_token_never_follows_a_redirection(tmp_path: Path, status: int) -> None:
    with serving(good) as other:

        def away(exchange: Exchange, seen: Seen) -> None:
            exchange.reply(status, Location=other.url + seen.path)

        with serving(away) as stub:
            client = client_of(stub.url, tmp_path)
            assert client.ask([ASKED])[0] is None
            assert client.ask([PLAN.id])[0] is None
    assert other.seen == []


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"])
def test_a_proxy_of_the_environment_sees_neither_request_nor_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with serving(good) as stub, serving(good) as proxy:
        monkeypatch.setenv(name, proxy.url)
        monkeypatch.delenv("no_proxy", raising=False)
        assert client_of(stub.url, tmp_path).ask([ASKED])[0] == PLAN
    assert (len(stub.seen), len(proxy.seen)) == (1, 0)


def test_a_service_that_recovers_is_no_news(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Fault] = [lambda exchange, _: exchange.problem(503, "starting"), close, good]

    def answer(exchange: Exchange, seen: Seen) -> None:
        answers.pop(0)(exchange, seen)

    with serving(answer) as stub:
        assert client_of(stub.url, tmp_path).ask([ASKED])[0] == PLAN
    assert len(stub.seen) == 3
    assert warnings_of(caplog) == []


def test_a_service_that_is_away_is_asked_once_and_one_warning_names_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keep(tmp_path)
    with serving(lambda exchange, _: exchange.hang()) as stub:
        client = client_of(stub.url, tmp_path, timeout_seconds=SOON_SECONDS)
        other = {**ASKED, "tokens_per_rank": 80}
        assert client.ask([other, ASKED, "3f9c21"]) == (None, PLAN, None)
    assert len(stub.seen) == 3
    (warning,) = warnings_of(caplog)
    assert warning.count("no answer") == 1
    assert [line.rpartition(": ")[2] for line in warning.splitlines()[1:4]] == [
        "NO PLAN, its layers run one chunk",
        f"goes on with its plan {PLAN.id[:12]}",
        "NO PLAN, its layers run one chunk",
    ]


def test_a_refused_question_does_not_keep_others_from_being_asked(tmp_path: Path) -> None:
    def answer(exchange: Exchange, seen: Seen) -> None:
        if seen.path == "/v1/plans/3f9c21":
            exchange.reply(500)
        else:
            exchange.plan(PLAN)

    with serving(answer) as stub:
        assert client_of(stub.url, tmp_path).ask(["3f9c21", ASKED]) == (None, PLAN)


def test_the_next_good_answer_takes_the_place_of_the_kept_answer(tmp_path: Path) -> None:
    keep(tmp_path)
    newer = replace(PLAN, warnings=("measured anew",))
    with serving(lambda exchange, _: exchange.plan(newer)) as stub:
        assert client_of(stub.url, tmp_path).ask([ASKED])[0] == newer
    assert client_of(closed_port(), tmp_path).ask([ASKED])[0] == newer


@pytest.mark.parametrize("text", [b"", b"{", edited(tokens_per_rank=80), OTHER, None])
def test_a_kept_plan_that_is_broken_or_foreign_is_of_no_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: bytes | None
) -> None:
    keep(tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.unlink()
    kept.mkdir() if text is None else kept.write_bytes(text)
    assert client_of(closed_port(), tmp_path).ask([ASKED])[0] is None
    (warning,) = warnings_of(caplog)
    assert str(kept) in warning
    assert ("Is a directory" if text is None else "refused") in warning


def test_a_full_disk_costs_the_copy_and_not_the_plan(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    keep(tmp_path)
    newer = replace(PLAN, warnings=("measured anew",))
    monkeypatch.setattr(os, "fsync", full)
    with serving(lambda exchange, _: exchange.plan(newer)) as stub:
        assert client_of(stub.url, tmp_path).ask([ASKED])[0] == newer
    (warning,) = warnings_of(caplog)
    assert "No space left" in warning
    (kept,) = tmp_path.iterdir()
    assert kept.read_text() == canonical_json(PLAN)


def test_each_try_waits_longer_than_the_last_and_the_first_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    here = threading.get_ident()

    def sleep(seconds: float) -> None:
        if threading.get_ident() == here:
            pauses.append(seconds)

    with serving(close) as stub:
        connection = ServiceConnection(stub.url, TOKEN, timeout_seconds=20.0)
        client = ServiceClient(connection, tmp_path, pause_seconds=0.25)
        monkeypatch.setattr(time, "sleep", sleep)
        assert client.ask([ASKED])[0] is None
        assert len(stub.seen) == 3
    assert pauses == [0.0, 0.25, 0.5]
