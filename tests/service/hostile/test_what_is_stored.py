"""What is sent to be stored: times that cannot be drawn."""

import sqlite3
import stat
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moetune import store
from moetune.app.planner import ServicePlanner
from moetune.app.report import write_report
from moetune.app.wiring import find_store
from moetune.config import Settings
from moetune.service.access import Access
from moetune.service.app import create_app
from tests.service.asking import SMALL, batch, client_of

WRONG: list[dict[str, Any]] = [
    {"seconds": [1e308]}, {"seconds": [1.0, 5e-324]}, {"predicted_seconds": 1e-320},
    {"predicted_seconds": 0.0}, {"seconds": [1e8]},
]  # fmt: skip


@pytest.mark.parametrize("change", WRONG)
def test_times_that_no_step_takes_are_refused_and_pages_stay_whole(
    change: dict[str, Any], planner: ServicePlanner
) -> None:
    with client_of(create_app(planner, Access())) as client:
        plan_id = client.post("/v1/plans:resolve", SMALL).json()["id"]
        answer = client.post("/v1/observations", batch(plan_id, {}, change))
        assert answer.status_code == 422
        assert "which no step takes" in answer.json()["detail"]
        kept = client.get("/v1/observations").json()
        assert [one for one in kept.values() if isinstance(one, list)] == [[]]
        for path in ("/", f"/plans/{plan_id}"):
            assert client.get(path).status_code == 200


def insert(database: Path, plan_id: str, predicted: float, seconds: str) -> int:
    """Store a row as an older version did, which looked at nothing."""
    with closing(sqlite3.connect(database)) as connection:
        with connection:
            found = connection.execute(
                "INSERT INTO observations (plan_id, forward_degree, backward_degree, "
                "tokens_per_rank, predicted_seconds, seconds, source, created_at) "
                "VALUES (?, 1, 1, 8, ?, ?, 'training', '2026-01-01T00:00:00.000000+00:00')",
                (plan_id, predicted, seconds),
            )
        return int(found.lastrowid or 0)


def test_rows_of_older_versions_break_no_page_and_can_be_removed(
    database: Path, planner: ServicePlanner, tmp_path: Path
) -> None:
    with client_of(create_app(planner, Access())) as client:
        plan_id = client.post("/v1/plans:resolve", SMALL).json()["id"]
        client.post("/v1/observations", batch(plan_id))
        strange = [insert(database, plan_id, *row) for row in ((1.0, "[1e308]"), (1e-320, "[1.0]"))]
        paths = ("/", f"/plans/{plan_id}", "/v1/observations", "/v1/drift", "/metrics")  # fmt: skip
        for path in paths:
            answer = client.get(path)
            assert answer.status_code == 200, path
            assert "inf" not in answer.text.lower().split(), path
    report = tmp_path / "report.html"
    write_report(report, profile=None, plans=(plan_id,), now=datetime.now(UTC), version="1",
                 stores=partial(find_store, Settings(db=str(database))))  # fmt: skip
    assert plan_id[:6] in report.read_text()
    problems = store.check(str(database))
    assert len(problems) == 2
    for number, problem in zip(reversed(strange), problems, strict=True):
        assert f"`moetune observations remove {number}`" in problem
    with store.open_store(str(database)) as opened:
        assert opened.remove_observations(strange) == 2
    assert store.check(str(database)) == ()


def test_a_database_is_its_owners_alone(tmp_path: Path) -> None:
    db = tmp_path / "team.db"
    with store.open_store(str(db)):
        pass
    assert stat.S_IMODE(db.stat().st_mode) == 0o600
