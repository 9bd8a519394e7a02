"""`open_planbook(online=True)`: from the user's call to the store and back in the next job."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import moetune
from moetune.app import wiring
from moetune.domain.errors import MoetuneError
from moetune.domain.plan import Plan
from moetune.domain.records import Settled
from moetune.store import open_store
from tests.runtime.online_workers import SHAPE, train
from tests.runtime.plans import small_plan

MOST_STEPS = 200


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    made = small_plan(layer=SHAPE, world_size=1, dtype="float64")
    with open_store(str(tmp_path / "it.db")) as store:
        store.save_plan(made)
    return made


def online(folder: Path) -> tuple[moetune.MoELayer, moetune.PlanBook]:
    book = moetune.open_planbook(db=str(folder / "it.db"), online=True)
    return moetune.MoELayer(8, 16, 4, 2, plan=book, dtype=torch.float64), book


def settled(folder: Path, plan: Plan) -> tuple[Settled, ...]:
    with open_store(str(folder / "it.db"), read_only=True) as store:
        return store.settled(plan.id)


def test_what_one_job_settles_the_next_runs_with(tmp_path: Path, plan: Plan) -> None:
    layer, book = online(tmp_path)
    for _ in range(MOST_STEPS):
        train(layer, 40)
        book.step()
        if settled(tmp_path, plan):
            break
    (size,) = settled(tmp_path, plan)
    assert size.tokens_per_rank == 40
    assert min(size.seconds) > 0
    assert [path.suffix for path in (tmp_path / "searches").iterdir()] == [".log"]

    other = size.decision.with_degree(size.decision.degree + 1)
    with open_store(str(tmp_path / "it.db")) as store:
        store.add_settled(replace(size, decision=other))
        store.add_settled(replace(size, decision=replace(other, backward_degree=7)))  # of before
        store.add_settled(replace(size, hardware_id="f" * 16))
    layer, book = online(tmp_path)
    for _ in range(3):
        train(layer, 40)
        book.step()
        assert layer.decision == other
    assert len(settled(tmp_path, plan)) == 4


def test_a_plan_that_is_only_a_file_is_stored_with_what_was_settled(tmp_path: Path) -> None:
    plan = small_plan(layer=SHAPE, world_size=1, dtype="float64", degrees=(2, 2))
    book = moetune.open_planbook(plan, db=str(tmp_path / "it.db"), online=True)
    layer = moetune.MoELayer(8, 16, 4, 2, plan=book, dtype=torch.float64)
    for _ in range(MOST_STEPS):
        train(layer, 40)
        book.step()
        if (tmp_path / "it.db").exists():
            break
    assert len(settled(tmp_path, plan)) == 1


def test_disabled_is_stock(tmp_path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOETUNE_DISABLE", "1")
    layer, book = online(tmp_path)
    for _ in range(3):
        train(layer, 40)
        book.step()
        assert layer.decision.forward_degree == 1
    assert settled(tmp_path, plan) == ()
    assert not (tmp_path / "searches").exists()


def test_a_book_that_is_not_online_takes_steps_too(tmp_path: Path, plan: Plan) -> None:
    book = moetune.open_planbook(db=str(tmp_path / "it.db"))
    book.step()
    assert book.plans == (plan,)


def test_without_optuna_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MoetuneError, match="pip install") as caught:
        moetune.open_planbook(db=str(tmp_path / "it.db"), online=True)
    assert "Optuna" in caught.value.what


def test_searches_lie_next_to_the_database_or_in_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for db, folder in (
        (str(tmp_path / "it.db"), tmp_path),
        (f"sqlite:///{tmp_path}/here/it.db", tmp_path / "here"),
        ("postgresql+psycopg://planner@db.example.org/moetune", tmp_path / "data" / "moetune"),
    ):
        settings = wiring.configure(db=db).settings
        assert wiring.searches_folder(settings) == folder / "searches"
