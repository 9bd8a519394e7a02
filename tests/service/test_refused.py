"""Requests that cannot be answered: each is a problem that says why, and nothing is stored."""

from typing import Any

import pytest

from moetune.service.problems import MEDIA_TYPE
from tests.service.asking import SMALL, Client

POSTS = ("/v1/plans:resolve", "/v1/whatif", "/v1/check", "/v1/profiles")
CODES = {409: 3, 422: 2, 424: 5}
"""The command line's exit codes by status."""
QUESTIONS: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "gpt-9"}, 422, "gpt-9"), ({"world_size": 0}, 422, "world_size"),
    ({"profile": "nowhere"}, 424, "nowhere"), ({"memory_limit_bytes": 1000}, 409, "memory"),
    ({"schema": "moetune.inputs/2"}, 422, "moetune.inputs/2"),
]  # fmt: skip
CHANGES: list[tuple[dict[str, Any], int, str]] = [
    ({"plan_id": 3}, 422, "plan_id"),
    ({"plan_id": "3f9c21"}, 404, "3f9c21"),
    ({"inputs": SMALL, "speeds": {"communication": "2"}}, 422, "communication"),
    ({"inputs": SMALL}, 422, "nothing is changed"),
    ({"inputs": SMALL, "changes": {"routing": "/etc/passwd"}}, 422, "neither balanced nor natural"),
    ({"inputs": SMALL, "changes": {"model": "/etc/passwd"}}, 422, "must be a name"),
    ({"inputs": SMALL, "change": {}}, 422, "unknown key 'change'"),
    ({}, 422, "not named"),
    ({"plan_id": "ab" * 32, "inputs": SMALL}, 422, "not named"),
]
NO_DOCUMENTS = [
    (b"", 400, "JSON"), (b'{"model": "gpt-s", "profi', 400, "JSON"), (b"\xff\xfe\x00", 400, "JSON"),
    (b"[" * 10_000 + b"]" * 10_000, 400, "deep"), (b'{"a":' * 40 + b"1" + b"}" * 40, 400, "deep"),
    (b"1" * 5000, 400, "JSON"), (b'{"a": 1e999}', 422, "inf"), (b'{"a": NaN}', 422, "nan"),
    (b'{"a": 9223372036854775808}', 422, "64 bits"), (b'"\\ud800"', 422, ""),
    (b'{"\\ud800": "\\ud800"}', 422, ""), (b"[]", 422, ""), (b"null", 422, ""),
]  # fmt: skip
KINDS = (None, "text/plain", "application/x-www-form-urlencoded", "application/octet-stream",
         "application/x-python-pickle", "multipart/form-data; boundary=x")  # fmt: skip
Row = tuple[str, str, dict[str, Any], int, str]
"""Method, address, what is sent, and the answer's status and words."""


def typed(kind: str | None, content: bytes) -> dict[str, Any]:
    return {"content": content, "headers": {} if kind is None else {"Content-Type": kind}}


def get(path: str, status: int, said: str) -> Row:
    return ("GET", path, {}, status, said)


def post(path: str, body: object, status: int, said: str) -> Row:
    return ("POST", path, {"json": body}, status, said)


REFUSED = [
    *(get(f"/v1/plans?limit={limit}", 422, "limit") for limit in ("0", "501", "-1", "ten", "1e2")),
    get(f"/v1/plans?after={'ab' * 32}", 404, "abab"),
    *(
        get(f"/v1/profiles/{name}", status, said)
        for name, status, said in (
            ("nowhere", 404, "nowhere"), ("%2e%2e%2fsecret.toml", 404, "does not exist"),
            ("x.toml", 422, "x.toml"), ("a%00b", 422, "not a profile's name"),
        )
    ),
    *(get(path, 404, path) for path in ("/v1", "/v2/plans", "/docs", "/redoc", "/v1/plans/")),
    *(
        (method, path, {}, 405, f"{path} does not support {method}")
        for path in ("/v1/plans", "/v1/profiles", "/healthz")
        for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "BREW")
    ),
    *(
        post(POSTS[0], {**SMALL, **change}, status, said) for change, status, said in QUESTIONS
    ),
    *(post(POSTS[1], body, status, said) for body, status, said in CHANGES),
    *(
        ("POST", path, typed("application/json", content), status, said)
        for path in POSTS for content, status, said in NO_DOCUMENTS
    ),
    *(
        ("POST", path, typed(kind, b'{"model": "gpt-s"}'), 415, "application/json")
        for path in POSTS for kind in KINDS
    ),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "sent", "status", "said"), REFUSED)
def test_a_request_that_cannot_be_answered_is_a_problem_that_says_why(
    steady: Client, method: str, path: str, sent: dict[str, Any], status: int, said: str
) -> None:
    answer = steady.ask(method, path, **sent)
    problem = answer.json()
    assert (answer.status_code, problem["status"]) == (status, status)
    assert answer.headers["content-type"] == MEDIA_TYPE
    assert problem["schema"] == "moetune.problem/1"
    assert problem["code"] == CODES.get(status, problem["code"])
    assert said in problem["detail"] + problem["hint"]
    assert (status == 405) == ("allow" in answer.headers)
