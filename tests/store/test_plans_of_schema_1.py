"""The database of the release before: its plans are listed, explained, traced, changed and served.

`schema_0004.sql` is such a database: seven plans of schema 1, for layers and for whole models,
three of them with a profile that only the database has, one with more degrees than are taken now,
two with another number of chunks backward than forward.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from moetune.app.files import bundled_profiles, load_profile_file
from moetune.app.library import read_plans
from moetune.app.plan import changed_question, layer_inputs, make_plan
from moetune.app.planner import ServicePlanner, open_planner
from moetune.app.subjects import LayerSubject
from moetune.app.whatif import WhatIf, whatif
from moetune.config import Settings
from moetune.domain.errors import InputError, ProfileError
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.service.access import Access
from moetune.service.app import create_app
from moetune.store import check, open_store, upgrade
from tests.service.asking import client_of

pytestmark = pytest.mark.unmeasured

OLD = Path(__file__).with_name("schema_0004.sql")
LAB, INTERLEAVED, REUSED, LIMITED = "4df683", "f2db3a", "6d1866", "2f9f27"
MODEL, CHUNKED, TENSOR = "d6423c", "ba7dae", "1f99c1"
LAYERS = (LAB, INTERLEAVED, REUSED, LIMITED, TENSOR)
WHOLE = (MODEL, CHUNKED)
UNEQUAL = (INTERLEAVED, REUSED)
"""Of both 2 chunks forward and 3 backward; the latter's are pinned."""


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServicePlanner]:
    path = tmp_path_factory.mktemp("old") / "old.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(OLD.read_text(encoding="utf-8"))
    upgrade(str(path))
    lines = check(str(path))
    assert sorted(line.partition(": plan ")[2][:6] for line in lines) == sorted(WHOLE)
    with open_store(str(path)) as store:  # before that machine's file counted what a process has
        profile = load_profile_file(bundled_profiles()["a100-x4"])
        machine = replace(profile.machine, memory_bytes=80 * 2**30)
        store.save_profile(replace(profile, machine=machine))
    with open_planner(Settings(db=str(path))) as opened:
        yield opened


def plan_of(old: ServicePlanner, plan_id: str) -> Plan:
    return old.sources.plan(plan_id).as_layer()


def plans(old: ServicePlanner) -> list[Plan]:
    return [plan_of(old, layer) for layer in LAYERS]


def test_they_are_listed_and_read_with_their_ids_and_schema(old: ServicePlanner) -> None:
    stored = {plan.id: plan for plan in plans(old)}
    listed = {info.id for info in old.reading.plans()}
    assert {plan_id for plan_id in listed if not plan_id.startswith(WHOLE)} == set(stored)
    assert {plan.schema for plan in stored.values()} == {1}
    assert all(plan.terms is None for plan in stored.values())
    for plan in plans(old):
        again = layer_inputs(changed_question(plan.inputs, {}), _profile(old, plan))
        bound = {"max-degree": "256"} if "max-degree" in plan.inputs.constraints else {}
        assert again == replace(plan.inputs, constraints={**plan.inputs.constraints, **bound})


@pytest.mark.parametrize("plan_id", LAYERS)
def test_an_explanation_lacks_terms_and_says_plan_again(old: ServicePlanner, plan_id: str) -> None:
    plan = plan_of(old, plan_id)
    subject = old.explain(plan)
    assert isinstance(subject, LayerSubject)
    assert (subject.document["forward"], subject.document["backward"]) == (None, None)
    assert subject.strategies == ()
    assert "make the plan again" in subject.note
    if plan_id in UNEQUAL:
        return
    again = make_plan(changed_question(plan.inputs, {}), profile=_profile(old, plan))
    assert again.terms is not None
    assert again.layout == plan.layout
    assert again.memory.strategy == plan.memory.strategy
    assert again.predicted.step_seconds == pytest.approx(plan.predicted.step_seconds, rel=1e-9)


@pytest.mark.parametrize("plan_id", WHOLE)
def test_a_whole_model_says_how_to_plan_it_again(old: ServicePlanner, plan_id: str) -> None:
    with pytest.raises(InputError, match="was withdrawn on") as caught:
        plan_of(old, plan_id)
    (row,) = (info for info in old.reading.plans() if info.id.startswith(plan_id))
    assert f"--world-size {row.world_size} --profile {row.profile}" in caught.value.hint
    table = read_plans(old.reading, (row,))
    assert [listed.plan for listed in table] == [None]


def test_a_plan_whose_profile_is_gone_or_changed_says_so(old: ServicePlanner) -> None:
    plan = plan_of(old, LAB)
    gone = replace(plan.inputs, profile="of-nobody")
    subject = old.explain(replace(plan, inputs=gone, id=gone.plan_id))
    assert subject.profile is None
    assert "there is no profile 'of-nobody'" in subject.missing
    changed = replace(plan.inputs, profile_fingerprint="ab" * 32)
    subject = old.explain(replace(plan, inputs=changed, id=changed.plan_id))
    assert subject.profile is None
    assert "has changed since" in subject.missing


def test_a_timeline_ends_where_the_plan_says(old: ServicePlanner) -> None:
    predicted = plan_of(old, TENSOR).predicted
    spans = [event for event in old.trace(plan_of(old, TENSOR)).events if event["ph"] == "X"]
    end = max(float(str(span["ts"])) + float(str(span["dur"])) for span in spans)
    assert end == pytest.approx(1e6 * (predicted.forward_seconds + predicted.backward_seconds))


def test_a_stored_plan_is_planned_again_for_other_tokens(old: ServicePlanner) -> None:
    plan = plan_of(old, INTERLEAVED)
    answer = whatif(old, plan, WhatIf(changes={"tokens_per_rank": 2048}))
    assert answer.before == plan
    assert answer.after.schema == 2
    assert answer.after.inputs.constraints == answer.before.inputs.constraints
    assert answer.after.inputs.tokens_per_rank == 2048
    pipeline = answer.after.as_layer().pipeline
    assert pipeline.forward_degree == pipeline.backward_degree


@pytest.mark.parametrize("plan_id", UNEQUAL)
def test_a_plan_with_two_degrees_is_shown_and_refused_where_it_would_be_priced(
    old: ServicePlanner, plan_id: str
) -> None:
    plan = plan_of(old, plan_id)
    assert plan.words.startswith("2 and 3 chunks")
    with pytest.raises(InputError, match="2 chunks forward and 3 backward are refused") as caught:
        old.trace(plan)
    assert "plan again" in caught.value.hint
    if plan_id == REUSED:
        with pytest.raises(InputError, match="exclude each other"):
            whatif(old, plan, WhatIf(changes={"tokens_per_rank": 2048}))


def test_the_service_answers_with_the_stored_documents(old: ServicePlanner) -> None:
    with client_of(create_app(old, Access())) as client:
        for plan in plans(old):
            read = client.get(f"/v1/plans/{plan.id}")
            assert read.text == old.reading.plan_documents([plan.id])[plan.id] + "\n"
            assert client.get(f"/plans/{plan.id}").status_code == 200
        listed = client.get("/v1/plans").json()["items"]
        assert {item["id"] for item in listed} >= {plan.id for plan in plans(old)}
        asked = {"model": "bert-l", "profile": "lab"}
        assert client.post("/v1/plans:resolve", asked).json()["id"] == plan_of(old, LAB).id


def _profile(old: ServicePlanner, plan: Plan) -> Profile:
    profile = old.explain(plan).profile
    if profile is None:
        raise ProfileError(f"profile {plan.inputs.profile!r} is another than that of the plan")
    return profile
