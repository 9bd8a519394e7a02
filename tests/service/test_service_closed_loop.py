"""Observed operations on the service: they correct profiles, and changes are named."""

from typing import Any

import pytest

from moetune.domain.document import encode
from moetune.domain.plan import plan_from_document
from moetune.domain.records import Observation
from moetune.fit.drift import NUM_FIRST, NUM_SKIPPED
from moetune.fit.scaled import Speeds, scale_profile
from moetune.service import observations as service
from moetune.service.observations import Corrector
from moetune.workflows.open_planner import ServicePlanner
from tests.service.asking import Client
from tests.workflows.test_corrections import LAYER, PLAN, PROFILE, observed

SLOW = scale_profile(PROFILE, Speeds(communication=0.5))
INPUTS = {
    "layer": encode(LAYER), "tokens_per_rank": 4096, "dtype": "float32", "world_size": 4,
    "profile": PROFILE.name,
}  # fmt: skip


@pytest.fixture
def measured(planner: ServicePlanner) -> ServicePlanner:
    """A service that has the profile."""
    planner.store.save_profile(PROFILE)
    return planner


def send(client: Client, *found: Observation) -> None:
    body = {"schema": "moetune.observations/1", "observations": [encode(one) for one in found]}
    assert client.post("/v1/observations", json=body).status_code == 201


def resolved(client: Client) -> dict[str, Any]:
    answer = client.post("/v1/plans:resolve", json=INPUTS)
    assert answer.status_code == 200
    document: dict[str, Any] = answer.json()
    return document


def test_jobs_that_report_a_slower_link_get_another_plan(
    client: Client, measured: ServicePlanner
) -> None:
    before = resolved(client)
    assert before["id"] == PLAN.id
    send(client, *(observed(PLAN, SLOW, seed=seed) for seed in range(3)))
    after = resolved(client)
    assert after["id"] != before["id"]
    assert resolved(client) == after
    plan = plan_from_document(after)
    assert plan.predicted.step_seconds > 1.1 * PLAN.predicted.step_seconds
    assert len(plan.warnings) > len(PLAN.warnings)
    profile = client.get(f"/v1/profiles/{PROFILE.name}").json()
    assert {one["op"] for one in profile["corrections"]} >= {"all_to_all"}
    assert measured.explain(plan.id).note == ""


def test_a_profile_is_not_judged_again_at_once(measured: ServicePlanner) -> None:
    measured.store.save_plan(PLAN)
    for pause_seconds, is_corrected in ((1e6, False), (0.0, True)):
        corrector = Corrector(measured, pause_seconds=pause_seconds)
        corrector.correct([observed(PLAN, SLOW)])  # nothing is stored yet, or not enough
        measured.store.add_observations([observed(PLAN, SLOW, seed=seed) for seed in range(2)])
        corrector.correct([observed(PLAN, SLOW)])
        profile = measured.reading.profile(PROFILE.name)
        assert profile is not None
        assert bool(profile.corrections) == is_corrected


def test_a_failure_to_judge_is_logged_and_the_rows_are_kept(
    client: Client,
    measured: ServicePlanner,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from moetune.domain.errors import StoreUnavailableError

    def fail(*_: object) -> None:
        raise StoreUnavailableError("the database is locked")

    monkeypatch.setattr(service, "update_corrections", fail)
    measured.store.save_plan(PLAN)
    send(client, observed(PLAN, SLOW))
    assert "the database is locked" in caplog.text
    assert len(measured.reading.observations(PLAN.id)) == 1


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_operations_without_time_are_refused_by_their_place(
    client: Client, measured: ServicePlanner, seconds: float
) -> None:
    measured.store.save_plan(PLAN)
    row = encode(observed(PLAN, SLOW, num=1))
    row["operations"][1]["seconds"] = [seconds]
    answer = client.post("/v1/observations", json={"observations": [row]})
    assert answer.status_code == 422
    assert "observations[0].operations[1]" in answer.json()["detail"]
    assert measured.reading.observations(PLAN.id) == ()


def test_an_operation_that_changed_is_named_in_json_and_on_the_page(
    client: Client, measured: ServicePlanner
) -> None:
    measured.store.save_plan(PLAN)
    assert client.get("/v1/drift").json() == {"schema": "moetune.drift/1", "items": []}
    num = NUM_FIRST + NUM_SKIPPED + 5
    for truth in (PROFILE, SLOW):
        send(client, *(observed(PLAN, truth, num=1, seed=seed) for seed in range(num)))
    found = client.get(f"/v1/drift?plan={PLAN.id}").json()["items"]
    assert {one["operation"]["name"] for one in found} == {"all_to_all"}
    for one in found:
        before, after = one["drift"]["before_seconds"], one["drift"]["seconds"]
        assert 1.7 < after / before < 2.3
        assert num - 2 <= one["drift"]["since_step"] <= num + 3
    assert "all_to_all" in client.get("/observed").text


def test_older_clients_send_no_operations(client: Client, measured: ServicePlanner) -> None:
    measured.store.save_plan(PLAN)
    row = encode(observed(PLAN, SLOW))
    del row["operations"], row["device_id"]
    assert client.post("/v1/observations", json={"observations": [row]}).status_code == 201
    (item,) = client.get("/v1/observations").json()["items"]
    assert (item["operations"], item["device_id"]) == ([], "")
