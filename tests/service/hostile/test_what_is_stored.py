"""What is sent to be stored: times that cannot be drawn, words that a spreadsheet would compute."""

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetune import store
from moetune.domain.document import decode
from moetune.domain.errors import InputError
from moetune.domain.operations import Operation, OperationTimes
from moetune.domain.records import Observation, check_storable
from moetune.report.section import Figure
from moetune.service.access import Access
from moetune.service.app import create_app
from moetune.workflows.planner import ServicePlanner
from tests.service.asking import client_of

ROW: dict[str, Any] = {
    "plan_id": "", "forward_degree": 1, "backward_degree": 1, "tokens_per_rank": 8,
    "predicted_seconds": 1.0, "seconds": [1.0], "source": "training",
}  # fmt: skip
WRONG: list[dict[str, Any]] = [
    {"seconds": [1e308]}, {"seconds": [1.0, 5e-324]}, {"predicted_seconds": 1e-320},
    {"predicted_seconds": 0.0}, {"seconds": [1e8]},
]  # fmt: skip


@pytest.mark.parametrize("change", WRONG)
def test_times_that_no_step_takes_are_refused_and_pages_stay_whole(
    change: dict[str, Any], planner: ServicePlanner
) -> None:
    with client_of(create_app(planner, Access())) as client:
        asked = {"model": "gpt-s", "profile": "rtx2080ti-x64"}
        plan_id = client.post("/v1/plans:resolve", asked).json()["id"]
        rows = [{**ROW, "plan_id": plan_id}, {**ROW, "plan_id": plan_id, **change}]
        body = {"schema": "moetune.observations/1", "observations": rows}
        answer = client.post("/v1/observations", body)
        assert answer.status_code == 422
        assert "which no step takes" in answer.json()["detail"]
        kept = client.get("/v1/observations").json()
        assert [one for one in kept.values() if isinstance(one, list)] == [[]]
        for path in ("/observed", f"/plans/{plan_id}"):
            assert client.get(path).status_code == 200


def test_the_times_of_operations_are_looked_at_too() -> None:
    plain = decode(Observation, {**ROW, "plan_id": "a" * 64}, "row")
    check_storable(plain)
    operation = Operation(name="all_to_all", phase="forward", size=8, degree=1)
    strange = OperationTimes(operation=operation, predicted_seconds=None, seconds=(1e300,))
    with pytest.raises(InputError, match=r"all_to_all has 1e\+300 s"):
        check_storable(replace(plain, operations=(strange,)))


def test_words_of_a_table_are_no_formulas() -> None:
    figure = Figure(
        name="f", title="F", words="", drawing={}, header=("=1+1", "seconds"),
        rows=(("@cmd", -1.5), ("-2", 3.0), ("plain", "+x")),
    )  # fmt: skip
    assert figure.csv.split("\r\n") == ["'=1+1,seconds", "'@cmd,-1.5", "'-2,3.0", "plain,'+x", ""]


def test_a_database_and_its_backup_are_their_owners_alone(tmp_path: Path) -> None:
    db = tmp_path / "team.db"
    with store.open_store(str(db)):
        pass
    copy = tmp_path / "copy.db"
    store.backup(str(db), copy)
    for file in (db, copy):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
