"""Bodies that are too long, cut short, too deep or of another kind: refused, and nothing kept."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from moetune.app.planner import ServicePlanner
from moetune.service.access import Access
from moetune.service.app import create_app
from tests.service.asking import Client, client_of

JSON = {"Content-Type": "application/json"}
POSTS = ("/v1/plans:resolve", "/v1/whatif", "/v1/check", "/v1/profiles")


@pytest.fixture(scope="module")
def narrow(steady_planner: ServicePlanner) -> Iterator[Client]:
    """Asks a service that takes no more than 1,000 bytes."""
    with client_of(create_app(steady_planner, Access(max_body_bytes=1000))) as made:
        yield made


async def _chunks(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b" " * 100


@pytest.mark.parametrize("path", POSTS)
def test_a_body_that_says_it_is_too_long_is_not_read(narrow: Client, path: str) -> None:
    answer = narrow.post(path, content=b" " * 1001, headers=JSON)
    assert (answer.status_code, answer.json()["status"]) == (413, 413)
    assert "1,000 bytes" in answer.json()["detail"]


@pytest.mark.parametrize("path", POSTS)
def test_a_body_that_comes_in_chunks_is_cut_off_at_the_limit(narrow: Client, path: str) -> None:
    inside = narrow.post(path, content=_chunks(10), headers=JSON)
    assert inside.status_code == 400
    beyond = narrow.post(path, content=_chunks(11), headers=JSON)
    assert beyond.status_code == 413
    assert beyond.headers["content-type"] == "application/problem+json"


def test_a_browser_gets_a_page_about_a_body_that_is_too_long(narrow: Client) -> None:
    for path, kind in (("/new", "text/html"), (POSTS[0], "json")):
        headers = {**JSON, "Accept": "text/html,*/*;q=0.8"}
        answer = narrow.post(path, content=b" " * 1001, headers=headers)
        assert (answer.status_code, answer.headers["connection"]) == (413, "close")
        assert kind in answer.headers["content-type"]
        assert "1,000 bytes" in answer.text


@pytest.mark.parametrize("length", ["1001", "99999999999999999999", "-1", "x", "1_0"])
def test_a_length_that_is_too_large_or_none_is_refused(narrow: Client, length: str) -> None:
    answer = narrow.post(POSTS[0], content=b"{}", headers={**JSON, "Content-Length": length})
    assert answer.status_code == 413


def test_what_nobody_foresaw_is_a_500_that_names_the_request_and_shows_no_code(
    planner: ServicePlanner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise ZeroDivisionError("a secret of the inside")

    monkeypatch.setattr(type(planner), "stored", fail)
    with client_of(create_app(planner, Access())) as client:
        answer = client.post(POSTS[0], {"model": "gpt-s"}, headers={"X-Request-ID": "job-7.rank-0"})
    assert answer.status_code == 500
    assert "job-7.rank-0" in answer.json()["hint"]
    assert "secret" not in answer.text
    assert "job-7.rank-0" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("given", ["a b", "x" * 65, "ä", ""])
def test_a_request_id_that_could_spoil_the_log_is_replaced(steady: Client, given: str) -> None:
    headers = httpx.Headers({"X-Request-ID": given}, encoding="utf-8")
    answer = steady.get("/healthz", headers=headers)
    assert answer.headers["x-request-id"] != given
    assert len(answer.headers["x-request-id"]) == 16
