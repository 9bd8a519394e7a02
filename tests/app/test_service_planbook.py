"""`open_planbook` with a plan service: from the user's call to the ranks and back."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import moetune
from moetune.domain.document import canonical_json
from moetune.domain.errors import InputError
from moetune.store import open_store
from tests.app import service_workers
from tests.app.service_workers import INPUTS
from tests.ranks import run_ranks
from tests.runtime.online_workers import SHAPE, train
from tests.runtime.plans import small_plan
from tests.runtime.stub_service import Exchange, Seen, Stub, serving

pytestmark = pytest.mark.usefixtures("token")
ALONE = small_plan(layer=SHAPE, world_size=1, dtype="float64")
TOGETHER = small_plan(layer=SHAPE, world_size=2, dtype="float64")
MOST_STEPS = 200
TOKEN = "write-7f3a"  # noqa: S105 - of no service


@pytest.fixture
def token(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert home.is_dir()
    monkeypatch.setenv("MOETUNE_TOKEN", TOKEN)


def plans(exchange: Exchange, seen: Seen) -> None:
    """Answer as a service does that has a plan for one rank and for two."""
    if seen.headers.get("Authorization") != f"Bearer {TOKEN}":
        exchange.problem(401, "no token")
    elif seen.path == "/v1/plans:resolve":
        exchange.plan(ALONE if seen.document["world_size"] == 1 else TOGETHER)
    elif seen.path == f"/v1/plans/{ALONE.id}":
        exchange.plan(ALONE)
    else:
        exchange.problem(404, f"there is no {seen.path}")


@pytest.fixture
def service() -> Iterator[Stub]:
    with serving(plans) as stub:
        yield stub


def layer_of(book: moetune.PlanBook) -> moetune.MoELayer:
    return moetune.MoELayer(8, 16, 4, 2, plan=book, dtype=torch.float64)


def test_a_job_asks_for_its_inputs_once_and_runs_the_plan(service: Stub) -> None:
    inputs = {**INPUTS, "layer": SHAPE, "profile": None}
    book = moetune.open_planbook(inputs, service=service.url + "/")
    layer = layer_of(book)
    for _ in range(6):
        train(layer, 40)
    assert layer.decision == ALONE.decide(40)
    (asked,) = service.documents("/v1/plans:resolve")
    assert asked == {**INPUTS, "layer": {**INPUTS["layer"], "activation": "gelu"}, "world_size": 1}  # type: ignore[dict-item]
    assert len(service.seen) == 1


@pytest.mark.parametrize("how", ["variable", "file"])
def test_the_service_may_be_a_setting(
    service: Stub, home: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "variable":
        monkeypatch.setenv("MOETUNE_URL", service.url)
    else:
        file = home / ".config" / "moetune" / "moetune.toml"
        file.parent.mkdir(parents=True)
        file.write_text(f'url = "{service.url}"')
    assert moetune.open_planbook(ALONE.id).plans == (ALONE,)
    other = replace(ALONE, warnings=("a file",))
    (home / "plan.json").write_text(canonical_json(other))
    assert moetune.open_planbook(["plan.json", INPUTS]).plans == (other, ALONE)
    assert moetune.open_planbook(TOGETHER).plans == (TOGETHER,)
    assert len(service.seen) == 2


def test_all_plans_are_those_of_the_store_whatever_the_setting(
    service: Stub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOETUNE_URL", service.url)
    with open_store(str(home / "it.db")) as store:
        store.save_plan(TOGETHER)
    assert moetune.open_planbook(db=str(home / "it.db")).plans == (TOGETHER,)
    assert service.seen == []


def test_the_search_in_training_takes_the_services_plan(service: Stub, home: Path) -> None:
    book = moetune.open_planbook(INPUTS, service=service.url, online=True, db=str(home / "it.db"))
    assert book.plans == (ALONE,)
    layer = layer_of(book)
    for _ in range(MOST_STEPS):
        train(layer, 40)
        book.step()
        if (home / "it.db").exists():
            break
    with open_store(str(home / "it.db")) as store:
        (settled,) = store.settled(ALONE.id)
    assert settled.tokens_per_rank == 40
    assert len(service.seen) == 1


def test_disabled_asks_nobody(service: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOETUNE_DISABLE", "1")
    assert moetune.open_planbook(INPUTS, service=service.url).plans == ()
    assert service.seen == []


@pytest.mark.parametrize(("source", "words"), [
    ({"tokens_per_rank": 40}, "lack 'model' or 'layer'"),
    ({"model": "gpt-s", "tokens": 40}, r"no input 'tokens'\s+known: .* tokens_per_rank"),
    ({"model": "gpt-s", "constraints": {"order": object()}}, "cannot be sent"),
    ("../plans:resolve", "cannot be read"),
    ("3f9c21", "begins with '3f9c21'"),
    (None, "the ids of the plans"),
])  # fmt: skip
def test_a_wrong_call_is_said_before_a_question(service: Stub, source: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        moetune.open_planbook(source, service=service.url)  # type: ignore[arg-type] # mistakes
    assert service.seen == []


def test_inputs_without_a_service_are_a_mistake(service: Stub) -> None:
    with pytest.raises(InputError, match="no plan service") as caught:
        moetune.open_planbook(INPUTS)
    assert "MOETUNE_URL" in caught.value.hint
    assert service.seen == []


def test_two_ranks_ask_once_together(
    service: Stub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOETUNE_URL", service.url)
    assert run_ranks(service_workers.asks_together, 2) == ["", ""]
    assert [body["world_size"] for body in service.documents("/v1/plans:resolve")] == [2]
    assert len(list((home / "cache" / "moetune" / "plans").iterdir())) == 1


def test_two_ranks_do_without_a_service_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that never answers leads to the safe plan, one that is gone to its last good plan."""
    with serving(plans) as gone:
        world = {**INPUTS, "world_size": 2}
        assert moetune.open_planbook(world, service=gone.url).plans == (TOGETHER,)
    with serving(lambda exchange, _: exchange.hang()) as hanging:
        monkeypatch.setenv("MOETUNE_URL", hanging.url)
        assert run_ranks(service_workers.does_without, 2, gone.url) == ["", ""]
    assert [body["tokens_per_rank"] for body in hanging.documents("/v1/plans:resolve")] == [80] * 3
