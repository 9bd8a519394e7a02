"""Lists come in pages, newest first; profiles come in whole or not at all."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetune.app.files import bundled_profiles, load_profile_file, parse_toml, profile_to_toml
from moetune.app.planner import ServicePlanner
from moetune.domain.document import encode
from tests.service.asking import SMALL, Client
from tests.store.values import observed_run

TOML = {"Content-Type": "application/toml"}


def _all(client: Client, path: str, *, limit: int) -> list[dict[str, Any]]:
    """Walk through a list, page by page."""
    items: list[dict[str, Any]] = []
    after = ""
    for _ in range(100):
        more = "&" if "?" in path else "?"
        answer = client.get(f"{path}{more}limit={limit}" + (f"&after={after}" if after else ""))
        assert answer.status_code == 200
        page = answer.json()
        assert 0 < len(page["items"]) <= limit
        items += page["items"]
        if page["next"] is None:
            return items
        after = page["next"]
    raise AssertionError("the list has no end")


def _plans(client: Client, tokens: Sequence[int]) -> list[str]:
    asked = ({**SMALL, "tokens_per_rank": number} for number in tokens)
    return [client.post("/v1/plans:resolve", question).json()["id"] for question in asked]


@pytest.mark.parametrize("limit", [1, 2, 3, 500])
def test_pages_of_plans_hold_every_plan_once_newest_first(client: Client, limit: int) -> None:
    made = _plans(client, (1024, 2048, 4096))
    plans = _all(client, "/v1/plans", limit=limit)
    assert [plan["id"] for plan in plans] == made[::-1]
    assert client.get("/v1/plans").json()["schema"] == "moetune.plans/1"


def test_profiles_list_the_stores_before_the_reference_machines(client: Client) -> None:
    reference = sorted(bundled_profiles())
    profile = replace(load_profile_file(bundled_profiles()[reference[0]]), name=reference[0])
    assert client.post("/v1/profiles", encode(profile)).status_code == 201
    items = client.get("/v1/profiles").json()["items"]
    assert [(item["source"], item["name"]) for item in items] == [
        ("store", reference[0]), *(("bundled", name) for name in reference),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["application/toml", "application/json"])
def test_a_profile_comes_back_as_it_was_sent_and_is_planned_with(client: Client, kind: str) -> None:
    profile = replace(load_profile_file(bundled_profiles()["rtx2080ti-x64"]), name="Größe 7")
    text = profile_to_toml(profile) if kind.endswith("toml") else json.dumps(encode(profile))
    answer = client.post("/v1/profiles", content=text.encode(), headers={"Content-Type": kind})
    assert answer.status_code == 201
    assert answer.json()["digest"] == profile.digest
    assert client.get(answer.headers["location"]).json() == encode(profile)
    as_toml = client.get(answer.headers["location"], headers={"Accept": "application/toml"})
    assert parse_toml(as_toml.text, "answer") == parse_toml(profile_to_toml(profile), "sent")
    plan = client.post("/v1/plans:resolve", {"model": "gpt-s", "profile": "Größe 7"}).json()
    assert plan["inputs"]["profile_fingerprint"] == profile.digest
    listed = client.get("/v1/profiles").json()["items"][0]
    assert (listed["name"], listed["num_runs"]) == ("Größe 7", 1)


def test_an_upload_is_read_as_a_file_with_base_and_units(client: Client, tmp_path: Path) -> None:
    text = (
        'schema = 1\nname = "ours"\nbase = "h100-x8"\nprovenance = "modelled"\n'
        "[machine]\nnum_devices = 16\ndevices_per_node = 4\nmemory = '80GB'\n"
        "[network]\nnics = 2\nnic_rate = '400Gbit/s'\n"
    )
    answer = client.post("/v1/profiles", content=text.encode(), headers=TOML)
    assert answer.status_code == 201
    (tmp_path / "ours.toml").write_text(text, encoding="utf-8")
    profile = load_profile_file(tmp_path / "ours.toml")
    assert answer.json()["digest"] == profile.digest
    assert client.get("/v1/profiles/ours").json() == encode(profile)
    asked = {"model": "gpt-s", "profile": "ours", "memory_limit_bytes": "40GB", "dtype": "bf16"}
    inputs = client.post("/v1/plans:resolve", asked).json()["inputs"]
    assert (inputs["memory_limit_bytes"], inputs["dtype"]) == (40 * 10**9, "bfloat16")


def test_a_profile_that_is_stored_already_is_not_stored_again(client: Client) -> None:
    text = bundled_profiles()["rtx2080ti-x64"].read_bytes()
    statuses = [
        client.post("/v1/profiles", content=text, headers=TOML).status_code for _ in range(3)
    ]
    assert statuses == [201, 200, 200]
    assert client.get("/v1/profiles").json()["items"][0]["num_runs"] == 1


@pytest.mark.parametrize(("spoil", "names"), [
    (lambda text: text[: text.rindex("=") + 1], "line"),
    (lambda text: text.replace('name = "rtx2080ti-x64"', 'name = "/etc/passwd"'), "name"),
    (lambda text: text.replace("schema = 1", "a = " + "[" * 3000), "TOML"),
    (lambda text: text.replace("num_devices = 64", f"num_devices = {10**30}"), "64 bits"),
])  # fmt: skip
def test_a_wrong_profile_is_refused_and_not_kept(steady: Client, spoil: Any, names: str) -> None:
    text = spoil(bundled_profiles()["rtx2080ti-x64"].read_text())
    answer = steady.post("/v1/profiles", content=text.encode(), headers=TOML)
    assert answer.status_code in {400, 422}
    assert names in answer.json()["detail"]
    listed = steady.get("/v1/profiles").json()["items"]
    assert {row["source"] for row in listed} == {"bundled"}


def test_observed_runs_come_in_pages_newest_first(client: Client, planner: ServicePlanner) -> None:
    (plan,) = _plans(client, (1024,))
    runs = [observed_run("olmoe", 1 + index / 8) for index in range(4)]
    runs.append(observed_run("mixtral-8x7b", plan_id=plan))
    numbers = [planner.store.add_observed_run(run) for run in runs]
    items = _all(client, "/v1/runs", limit=2)
    expected = [{"id": number, **encode(run)} for number, run in zip(numbers, runs, strict=True)]
    assert [
        {key: value for key, value in item.items() if key != "created_at"} for item in items
    ] == expected[::-1]
    assert [item["id"] for item in _all(client, f"/v1/runs?plan={plan}", limit=2)] == numbers[-1:]


@pytest.mark.parametrize(("method", "path", "status"), [
    ("POST", "/v1/observations", 404), ("GET", "/v1/observations", 404),
    ("GET", "/v1/drift", 404),
])  # fmt: skip
def test_jobs_no_longer_send_steps(steady: Client, method: str, path: str, status: int) -> None:
    assert steady.ask(method, path).status_code == status
