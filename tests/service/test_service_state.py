"""Health, readiness and metrics, while the database comes and goes."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moetune.app.files import bundled_profiles
from moetune.app.planner import ServicePlanner, open_planner
from moetune.config import Settings
from moetune.service.access import Access
from moetune.service.app import create_app
from tests.service.asking import Client, client_of

TOML = {"Content-Type": "application/toml"}


@pytest.fixture
def away(database: Path) -> Iterator[Path]:
    """Where the database is put aside."""
    place = database.with_name("away")
    yield place
    if place.exists():
        _move(place, database)


def _move(source: Path, target: Path) -> None:
    for end in ("", "-wal", "-shm"):
        part = Path(f"{source}{end}")
        if part.exists():
            part.rename(f"{target}{end}")


def _metrics(client: Client) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def _count(metrics: dict[Any, float], route: str, status: int) -> float:
    labels = (("method", "GET"), ("route", route), ("status", str(status)))
    return metrics.get(("moetune_requests_total", labels), 0.0)


def test_without_its_database_the_service_lives_is_not_ready_and_recovers(
    client: Client, inputs: dict[str, Any], database: Path, away: Path
) -> None:
    plan = client.post("/v1/plans:resolve", inputs)
    assert client.get("/readyz").json() == {
        "schema": "moetune.ready/1", "ready": True, "problems": [],
    }  # fmt: skip
    _move(database, away)
    assert client.get("/healthz").status_code == 200
    ready = client.get("/readyz")
    assert (ready.status_code, ready.json()["ready"]) == (503, False)
    assert ready.json()["problems"]
    assert ready.headers["retry-after"]
    for path in ("/v1/plans", "/v1/profiles", f"/v1/plans/{plan.json()['id']}/trace"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()["status"]) == (503, 503)
        assert answer.headers["retry-after"]
    fresh = client.post("/v1/plans:resolve", {**inputs, "tokens_per_rank": 777})
    assert fresh.status_code == 503
    assert _metrics(client)["moetune_ready", ()] == 0
    _move(away, database)
    assert client.get("/readyz").status_code == 200
    assert client.get(plan.headers["content-location"]).content == plan.content
    assert client.post("/v1/plans:resolve", inputs).content == plan.content


def test_a_locked_database_answers_503_to_writers_and_is_read_meanwhile(
    inputs: dict[str, Any], database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moetune.app.planner.PATIENCE_SECONDS", 0.2)
    with (
        open_planner(Settings(db=str(database))) as planner,
        client_of(create_app(planner, Access())) as client,
    ):
        _lock_and_release(client, inputs, database)


def _lock_and_release(client: Client, inputs: dict[str, Any], database: Path) -> None:
    plan = client.post("/v1/plans:resolve", inputs)
    profile = {"content": bundled_profiles()["rtx2080ti-x64"].read_bytes(), "headers": TOML}
    with closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        refused = client.post("/v1/profiles", **profile)
        assert refused.status_code == 503
        assert "locked" in refused.json()["detail"]
        assert client.get(plan.headers["content-location"]).status_code == 200
        assert client.get("/readyz").status_code == 503
    assert client.get("/readyz").status_code == 200
    assert client.post("/v1/profiles", **profile).status_code == 201


def test_metrics_count_requests_by_route_and_not_by_address(client: Client) -> None:
    for number in range(3):
        client.get(f"/v1/plans/{number:064x}")
        client.get(f"/nowhere/{number}")
    client.get("/v1/plans")
    metrics = _metrics(client)
    assert _count(metrics, "/v1/plans/{plan_id}", 404) == 3
    assert _count(metrics, "none", 404) == 3
    assert _count(metrics, "/v1/plans", 200) == 1
    assert metrics["moetune_request_seconds_count", (("route", "/v1/plans"),)] == 1
    assert metrics["moetune_ready", ()] == 1


def test_two_services_in_one_process_count_apart(planner: ServicePlanner) -> None:
    with (
        client_of(create_app(planner, Access())) as first,
        client_of(create_app(planner, Access())) as second,
    ):
        first.get("/healthz")
        assert _count(_metrics(first), "/healthz", 200) == 1
        assert _count(_metrics(second), "/healthz", 200) == 0
