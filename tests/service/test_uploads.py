"""The form that adds a profile: who may send it, and what it refuses."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from moetune.domain.profile import Profile
from moetune.service.access import Access
from moetune.service.app import create_app
from moetune.service.middleware import COOKIE
from moetune.service.quotas import QuotaLimits
from moetune.service.uploads import MAX_FILE_BYTES
from moetune.workflows.files import profile_to_toml
from moetune.workflows.open_planner import ServicePlanner
from tests.report.lab import lab_profile
from tests.service.asking import BASE_URL, READ, WRITE, Client, client_of

HTML = {"Accept": "text/html"}
OWN = {**HTML, "Origin": BASE_URL, "Sec-Fetch-Site": "same-origin"}
TEXT = profile_to_toml(lab_profile())


def upload(client: Client, content: bytes | str, headers: Any = None, **fields: str) -> Any:
    data = content.encode() if isinstance(content, str) else content
    return client.ask(
        "POST", "/machines", files={"file": ("lab.toml", data)}, data=fields,
        headers=OWN if headers is None else headers,
    )  # fmt: skip


def names(planner: ServicePlanner) -> set[str]:
    return {one.profile for one in planner.reading.fits(limit=100)}


@pytest.fixture
def client(planner: ServicePlanner) -> Iterator[Client]:
    """Asks a service that wants no token, with the largest body of `moetune serve`."""
    with client_of(create_app(planner, Access())) as made:
        yield made


def test_a_file_becomes_the_profile_of_its_name_or_of_another(
    client: Client, planner: ServicePlanner
) -> None:
    answer = upload(client, TEXT)
    assert (answer.status_code, answer.headers["location"]) == (303, "/profiles/lab")
    stored = planner.reading.profile("lab")
    assert stored is not None
    assert stored.digest == lab_profile().digest
    assert upload(client, TEXT, name="lab two").headers["location"] == "/profiles/lab%20two"
    assert names(planner) == {"lab", "lab two"}
    upload(client, TEXT)
    assert len(planner.reading.fits(limit=100)) == 2


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (b"", 422, "no file was chosen"),
        (b"\xff\xfe\x00", 400, "UTF-8"),
        ("#" * (MAX_FILE_BYTES + 1), 422, "1.00 MiB"),
        (TEXT.replace('"lab"', '"../lab"', 1), 422, "is not a profile"),
    ],
)
def test_a_wrong_file_is_named_beside_the_form_and_nothing_is_stored(
    client: Client, planner: ServicePlanner, content: bytes | str, status: int, words: str
) -> None:
    answer = upload(client, content)
    assert answer.status_code == status
    assert 'role="alert"' in answer.text
    assert words in answer.text
    assert 'type="file"' in answer.text
    assert names(planner) == set()


def test_five_megabytes_are_refused_before_they_are_read(
    client: Client, planner: ServicePlanner
) -> None:
    answer = upload(client, b"#" * 5 * 2**20)
    assert answer.status_code == 413
    assert answer.headers["connection"] == "close"
    assert names(planner) == set()


@pytest.mark.parametrize("name", ["lab", "rtx2080ti-x64"])
def test_the_name_of_another_machine_is_refused(
    client: Client, planner: ServicePlanner, name: str
) -> None:
    upload(client, TEXT)
    other: Profile = replace(
        lab_profile(), name=name, machine=replace(lab_profile().machine, device="Other GPU")
    )
    answer = upload(client, profile_to_toml(other))
    assert answer.status_code == 422
    assert "another machine" in answer.text
    assert upload(client, profile_to_toml(other), name="other").status_code == 303
    assert names(planner) == {"lab", "other"}


def test_who_is_not_logged_in_is_asked_to_and_a_session_gives_the_write_token(
    guarded: Client, planner: ServicePlanner
) -> None:
    out = upload(guarded, TEXT)
    assert (out.status_code, out.headers["location"]) == (303, "/login?next=/machines")
    assert upload(guarded, TEXT, {**OWN, "Accept": "*/*"}).status_code == 401
    page = guarded.ask("POST", "/login", content=f"token={READ}", headers={
        **OWN, "Content-Type": "application/x-www-form-urlencoded",
    })  # fmt: skip
    session = {**OWN, "Cookie": f"{COOKIE}={page.cookies[COOKIE]}"}
    assert 'name="token"' in guarded.get("/machines", headers=session).text
    for wrong in ("", READ, "x" * 20):
        refused = upload(guarded, TEXT, session, token=wrong)
        assert refused.status_code == 403
        assert "write token" in refused.text
        assert WRITE not in refused.text
    assert names(planner) == set()
    assert upload(guarded, TEXT, session, token=WRITE).status_code == 303
    assert names(planner) == {"lab"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "null"},
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site", "Origin": BASE_URL},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_only_a_page_of_this_service_may_send_the_form(
    client: Client, planner: ServicePlanner, headers: dict[str, str]
) -> None:
    assert upload(client, TEXT, headers).status_code == 403
    assert names(planner) == set()


def test_the_hours_quota_of_profiles_holds_for_the_form(planner: ServicePlanner) -> None:
    with client_of(create_app(planner, Access(), QuotaLimits(profiles=2))) as one:
        answers = [upload(one, TEXT, name=f"lab{at}").status_code for at in range(3)]
    assert answers == [303, 303, 429]
    assert names(planner) == {"lab0", "lab1"}


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/toml", 415),
        ("multipart/form-data", 400),
        ("multipart/form-data; boundary=", 400),
    ],
)
def test_another_kind_of_body_is_refused(client: Client, kind: str, status: int) -> None:
    headers = {**OWN, "Content-Type": kind}
    answer = client.ask("POST", "/machines", content=TEXT.encode(), headers=headers)
    assert answer.status_code == status


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.toml"\r\n\r\nsch',
        b"--other\r\n\r\n--other--\r\n",
        b"".join(
            b'--b\r\nContent-Disposition: form-data; name="f%d"\r\n\r\nx\r\n' % at
            for at in range(11)
        )
        + b"--b--\r\n",
        b"--b\r\nno header\r\n\r\n\r\n--b--\r\n",
    ],
)
def test_a_broken_form_adds_nothing(client: Client, planner: ServicePlanner, body: bytes) -> None:
    headers = {**OWN, "Content-Type": "multipart/form-data; boundary=b"}
    answer = client.ask("POST", "/machines", content=body, headers=headers)
    assert answer.status_code in {400, 422}
    assert names(planner) == set()
