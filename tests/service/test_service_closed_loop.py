"""Observed operations on the service: they are stored, and changes are named."""

import pytest

from moetune.app.planner import ServicePlanner
from moetune.domain.document import encode
from moetune.domain.records import Observation
from moetune.fit.drift import NUM_FIRST, NUM_SKIPPED
from moetune.fit.speeds import Speeds, scale_profile
from tests.app.observed import PLAN, PROFILE, observed
from tests.service.asking import Client

SLOW = scale_profile(PROFILE, Speeds(communication=0.5))


@pytest.fixture
def measured(planner: ServicePlanner) -> ServicePlanner:
    """A service that has the profile."""
    planner.store.save_profile(PROFILE)
    return planner


def send(client: Client, *found: Observation) -> None:
    body = {"schema": "moetune.observations/1", "observations": [encode(one) for one in found]}
    assert client.post("/v1/observations", json=body).status_code == 201


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
    assert measured.reading.observation_page(PLAN.id) == ()


def test_a_changed_operation_is_named_on_the_page(client: Client, measured: ServicePlanner) -> None:
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
    for page in ("/", f"/plans/{PLAN.id}"):
        assert f"of plan {PLAN.id[:6]} takes longer since" in client.get(page).text


def test_older_clients_send_no_operations(client: Client, measured: ServicePlanner) -> None:
    measured.store.save_plan(PLAN)
    row = encode(observed(PLAN, SLOW))
    del row["operations"], row["device_id"]
    assert client.post("/v1/observations", json={"observations": [row]}).status_code == 201
    (item,) = client.get("/v1/observations").json()["items"]
    assert (item["operations"], item["device_id"]) == ([], "")
