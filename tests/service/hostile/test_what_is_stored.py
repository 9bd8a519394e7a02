"""What older versions stored: times that no step takes."""

import sqlite3
import stat
from contextlib import closing
from functools import partial
from pathlib import Path

from moetune import store
from moetune.app.planner import ServicePlanner
from moetune.app.report import write_report
from moetune.app.wiring import find_store
from moetune.config import Settings
from moetune.service.access import Access
from moetune.service.app import create_app
from tests.service.asking import SMALL, client_of


def insert(database: Path, plan_id: str, planned: float, seconds: str) -> None:
    """Store a row as an older version did, which looked at nothing."""
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute(
            "INSERT INTO settled (plan_id, hardware_id, tokens_per_rank, forward_degree, "
            "backward_degree, issue_order, strategy, median_seconds, planned_seconds, seconds, "
            "num_steps, created_at) VALUES (?, 'f', 8, 1, 1, 'interleaved', 'none', 1, ?, ?, 9, "
            "'2026-01-01T00:00:00.000000+00:00')",
            (plan_id, planned, seconds),
        )


def test_rows_of_older_versions_break_no_page_and_can_be_removed(
    database: Path, planner: ServicePlanner, tmp_path: Path
) -> None:
    with client_of(create_app(planner, Access())) as client:
        plan_id = client.post("/v1/plans:resolve", SMALL).json()["id"]
        for row in ((1.0, "[1e308]"), (1e-320, "[1.0]")):
            insert(database, plan_id, *row)
        for path in ("/", f"/plans/{plan_id}", "/metrics"):
            answer = client.get(path)
            assert answer.status_code == 200, path
            assert "inf" not in answer.text.lower().split(), path
    report = tmp_path / "report.html"
    write_report(report, profile=None, plans=(plan_id,),
                 stores=partial(find_store, Settings(db=str(database))))  # fmt: skip
    assert plan_id[:6] in report.read_text()
    problems = store.check(str(database))
    assert len(problems) == 2
    for problem in problems:
        assert f"`moetune plans remove {plan_id[:12]}`" in problem
    with store.open_store(str(database)) as opened:
        assert opened.remove_plans([plan_id]).settled == 2
    assert store.check(str(database)) == ()


def test_a_database_is_its_owners_alone(tmp_path: Path) -> None:
    db = tmp_path / "team.db"
    with store.open_store(str(db)):
        pass
    assert stat.S_IMODE(db.stat().st_mode) == 0o600
