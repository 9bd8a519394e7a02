"""Who is let in: tokens, the cookie, names of hosts, and what every answer carries."""

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moetune.app.planner import ServicePlanner
from moetune.domain.errors import InputError
from moetune.service.access import (
    Access,
    Sessions,
    check_exposure,
    is_loopback,
    names_of,
    read_token_file,
)
from moetune.service.app import create_app
from moetune.service.middleware import SECURITY_HEADERS
from moetune.service.server import ServerOptions, access_of
from tests.service.asking import READ, WRITE, Client, client_of

READS = ("/v1/plans", "/v1/profiles", "/v1/runs", "/metrics",
         "/openapi.json", "/v1/profiles/rtx2080ti-x64", "/nowhere")  # fmt: skip
WRITES = ("/v1/plans:resolve", "/v1/profiles", "/nowhere")


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.parametrize("path", READS)
def test_reading_takes_either_token(steady_guarded: Client, path: str) -> None:
    refused = steady_guarded.get(path)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"].startswith("Bearer")
    assert (refused.json()["code"], "missing" in refused.json()["detail"]) == (4, True)
    for token in (READ, WRITE):
        assert steady_guarded.get(path, headers=_bearer(token)).status_code in {200, 404}


@pytest.mark.parametrize("value", [
    "Bearer wrong-token-0123456789", f"Bearer {READ}x", f"Bearer {READ[:-1]}", "Bearer", "",
    f"Basic {READ}", READ, f"Token {READ}", "Bearer ä", f"Bearer {READ} {WRITE}",
])  # fmt: skip
def test_a_wrong_token_is_refused(steady_guarded: Client, value: str) -> None:
    headers = {"Authorization": value.encode("latin-1")}
    answer = steady_guarded.ask("GET", "/v1/plans", headers=headers)
    assert answer.status_code == 401
    assert READ not in answer.text


@pytest.mark.parametrize("path", WRITES)
def test_writing_takes_the_write_token(steady_guarded: Client, path: str) -> None:
    assert steady_guarded.post(path, {}).status_code == 401
    refused = steady_guarded.post(path, {}, headers=_bearer(READ))
    assert (refused.status_code, refused.json()["code"]) == (403, 4)
    assert steady_guarded.post(path, {}, headers=_bearer(WRITE)).status_code not in {401, 403}


def test_what_if_only_reads(steady_guarded: Client) -> None:
    assert steady_guarded.post("/v1/whatif", {}).status_code == 401
    assert steady_guarded.post("/v1/whatif", {}, headers=_bearer(READ)).status_code == 422


def test_a_token_in_the_address_opens_nothing(steady_guarded: Client) -> None:
    for name in ("token", "access_token", "authorization"):
        assert steady_guarded.get(f"/v1/plans?{name}={READ}").status_code == 401


def test_health_needs_no_token_and_has_no_reasons(planner: ServicePlanner, database: Path) -> None:
    with client_of(create_app(planner, Access(read_token=READ))) as client:
        assert client.get("/healthz").status_code == 200
        assert client.get("/readyz").json()["ready"] is True
        database.rename(database.with_suffix(".away"))
        shown = client.get("/readyz", headers=_bearer(READ))
        secret = client.get("/readyz")
    assert (shown.status_code, secret.status_code) == (503, 503)
    assert str(database) in shown.text
    assert str(database) not in secret.text


@pytest.mark.parametrize(("read", "write", "reads", "writes"), [
    (READ, None, {READ}, set[str]()),
    (None, WRITE, {WRITE}, {WRITE}),
    (READ, WRITE, {READ, WRITE}, {WRITE}),
])  # fmt: skip
def test_one_token_alone_leaves_nothing_open(
    read: str | None, write: str | None, reads: set[str], writes: set[str]
) -> None:
    access = Access(read_token=read, write_token=write)
    for token in (READ, WRITE, "", "None", None):
        right = access.right_of(token)
        assert (right != "none") is (token in reads)
        assert (right == "write") is (token in writes)


def _log_in(client: Client, token: str, target: str = "/compare?first=1") -> Any:
    return client.ask("POST", "/login", data={"token": token, "next": target})


@pytest.mark.parametrize("token", [READ, WRITE])
def test_a_browser_signs_in_and_reads_with_its_cookie(steady_guarded: Client, token: str) -> None:
    form = steady_guarded.get("/login?next=/compare")
    assert (form.status_code, form.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert 'value="/compare"' in form.text
    entered = _log_in(steady_guarded, token)
    assert (entered.status_code, entered.headers["location"]) == (303, "/compare?first=1")
    cookie = entered.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert token not in cookie
    pair = {"Cookie": cookie.partition(";")[0]}
    assert steady_guarded.get("/v1/plans", headers=pair).status_code == 200
    assert steady_guarded.post("/v1/plans:resolve", {}, headers=pair).status_code == 403
    assert steady_guarded.get("/v1/plans", headers={"Cookie": "moetune_page=x"}).status_code == 401


def test_logging_out_takes_the_cookie_back(steady_guarded: Client) -> None:
    answer = steady_guarded.post("/logout")
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert re.search(r"moetune_page=\W.*Max-Age=0", answer.headers["set-cookie"])


def test_who_has_logged_out_has_no_session_any_more(steady_guarded: Client) -> None:
    entered = _log_in(steady_guarded, READ)
    pair = {"Cookie": entered.headers["set-cookie"].partition(";")[0]}
    other = _log_in(steady_guarded, READ).headers["set-cookie"].partition(";")[0]
    assert steady_guarded.get("/v1/plans", headers=pair).status_code == 200
    steady_guarded.post("/logout", headers=pair)
    assert steady_guarded.get("/v1/plans", headers=pair).status_code == 401
    assert steady_guarded.get("/v1/plans", headers={"Cookie": other}).status_code == 200


def test_sessions_end_with_their_time_and_their_number() -> None:
    now = 0.0
    sessions = Sessions(lambda: now)
    first = sessions.open()
    now = 6 * 24 * 3600.0
    assert sessions.has(first)
    now = 8 * 24 * 3600.0
    assert not sessions.has(first)
    names = [sessions.open() for _ in range(1001)]
    assert [sessions.has(name) for name in names[:2]] == [False, True]
    assert not sessions.has("")


def test_a_form_with_too_many_fields_is_refused(steady_guarded: Client) -> None:
    content = "&".join(f"field{number}=1" for number in range(101))
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = steady_guarded.ask("POST", "/login", content=content, headers=headers)
    assert answer.status_code == 400
    assert "Too many fields. Maximum number of fields is 10" in answer.json()["detail"]


def test_a_wrong_token_in_the_form_sets_no_cookie(steady_guarded: Client) -> None:
    answer = _log_in(steady_guarded, "wrong", '/"><script>')
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    assert "<script>" not in answer.text


@pytest.mark.parametrize(
    "target", ["https://evil.example/", "//evil.example", "/\\evil.example", "evil", "/a\r\nb", ""]
)
def test_the_form_leads_to_no_other_site(steady_guarded: Client, target: str) -> None:
    assert _log_in(steady_guarded, READ, target).headers["location"] == "/"


def test_a_browser_without_a_token_is_led_to_the_form(steady_guarded: Client) -> None:
    answer = steady_guarded.get("/plans/ab", headers={"Accept": "text/html,*/*"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=/plans/ab")
    assert steady_guarded.get("/v1/plans", headers={"Accept": "text/html"}).status_code == 401


def test_where_no_token_is_asked_for_the_form_leads_on(steady: Client) -> None:
    answer = steady.get("/login?next=/compare")
    assert (answer.status_code, answer.headers["location"]) == (303, "/compare")


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "", "localhost.", "[::2]", "8.8.8.8", "[::1]evil",
     "[::1]:80:80", "127.0.0.1:evil", "[::1", "::1]"],
)  # fmt: skip
def test_a_name_that_is_not_the_services_is_refused(steady: Client, host: str) -> None:
    answer = steady.get("/healthz", headers={"Host": host})
    assert answer.status_code == 421
    assert "--allow-host" in answer.json()["hint"]


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:8642", "[::1]:8642", "[::1]"]
)
def test_a_name_of_this_machine_is_answered(steady: Client, host: str) -> None:
    assert steady.get("/healthz", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_of_another_site_may_not_write(steady: Client, site: str) -> None:
    headers = {"Sec-Fetch-Site": site}
    assert steady.post("/v1/plans:resolve", {}, headers=headers).status_code == 403
    assert steady.post("/login", headers=headers).status_code == 403
    same_origin = {"Sec-Fetch-Site": "same-origin"}
    assert steady.post("/v1/plans:resolve", {}, headers=same_origin).status_code == 422


@pytest.mark.parametrize("path", ["/healthz", "/v1/plans", "/nowhere", "/login", "/openapi.json"])
def test_every_answer_carries_the_headers_of_safety_and_opens_to_no_other_site(
    steady_guarded: Client, path: str
) -> None:
    for headers in ({}, _bearer(READ), {"Host": "evil.example"}):
        answer = steady_guarded.get(path, headers={"Origin": "https://evil.example", **headers})
        for name, value in SECURITY_HEADERS:
            assert answer.headers[name.decode()] == value.decode()
        assert answer.headers["x-request-id"]
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_an_address_that_others_reach_needs_a_token() -> None:
    for host in ("0.0.0.0", "192.0.2.1", "::"):  # noqa: S104 - it is refused
        with pytest.raises(InputError, match="no token is set") as caught:
            check_exposure(Access(), host)
        assert "--write-token-file" in caught.value.hint
        check_exposure(Access(write_token=WRITE), host)
    check_exposure(Access(), "127.0.0.1")
    check_exposure(Access(), "localhost")


def test_a_name_for_a_proxy_needs_a_token() -> None:
    with pytest.raises(InputError, match=r"plans\.example"):
        access_of(ServerOptions(allow_hosts=("plans.example",)))


def test_loopback_is_known_by_its_address() -> None:
    assert is_loopback("127.8.7.6")
    assert not is_loopback("192.0.2.1")
    with pytest.raises(InputError, match="no address"):
        is_loopback("no such host")


def test_a_service_on_every_address_answers_to_this_machines_name() -> None:
    assert socket.gethostname().lower() in names_of("0.0.0.0")  # noqa: S104 - a name
    assert socket.gethostname().lower() not in names_of("127.0.0.1")


def _token_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / f"token-{mode:o}"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_token_is_read_without_its_line_end(tmp_path: Path) -> None:
    assert read_token_file(_token_file(tmp_path, f"{READ}\n")) == READ


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o644, 0o601, 0o660])
def test_a_token_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    path = _token_file(tmp_path, READ, mode)
    with pytest.raises(InputError, match="open to others") as caught:
        read_token_file(path)
    assert f"chmod 600 {path}" in caught.value.hint
    assert READ not in str(caught.value)


@pytest.mark.parametrize("text", ["", "short", f"{READ} {READ}", f"{READ}\n{READ}", "ä" * 20])
def test_a_file_that_holds_no_token_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="token file") as caught:
        read_token_file(_token_file(tmp_path, text))
    assert "secrets.token_hex" in caught.value.hint


@pytest.mark.parametrize("num_characters", [4096, 4097, 10_000])
def test_a_file_too_long_for_a_token_is_refused(tmp_path: Path, num_characters: int) -> None:
    with pytest.raises(InputError):
        read_token_file(_token_file(tmp_path, "a" * num_characters))
    assert read_token_file(_token_file(tmp_path, "a" * 4095)) == "a" * 4095


@pytest.mark.parametrize("make", [Path.mkdir, Path.exists])
def test_a_file_without_a_token_is_refused(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "token")
    with pytest.raises(InputError, match="token file"):
        read_token_file(tmp_path / "token")


def test_one_token_for_both_rights_is_refused(tmp_path: Path) -> None:
    path = _token_file(tmp_path, READ)
    with pytest.raises(InputError, match="are the same"):
        access_of(ServerOptions(read_token_file=path, write_token_file=path))


def test_tokens_are_in_no_text_about_the_access() -> None:
    text = repr(Access(read_token=READ, write_token=WRITE))
    assert READ not in text
    assert WRITE not in text
