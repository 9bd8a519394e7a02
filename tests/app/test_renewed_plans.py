"""`open_planbook(renew=True)`: plans for the ranks that are there now."""

import logging
from pathlib import Path

import pytest

import moetune
from moetune.domain.errors import InputError
from moetune.store import open_store
from tests.runtime.online_workers import SHAPE
from tests.runtime.plans import small_plan
from tests.runtime.stub_service import Exchange, Seen, serving

pytestmark = pytest.mark.usefixtures("home")
ALONE = small_plan(layer=SHAPE, world_size=1, tokens=80)


def test_the_plan_is_made_from_the_profile_with_the_same_tokens_and_stored(home: Path) -> None:
    db = str(home / "it.db")
    old = moetune.plan(
        d_model=64, d_hidden=64, num_experts=12, tokens=90, dtype="float32", world_size=4,
        profile="rtx2080ti-x64", allow_modelled=True, max_degree=2, db=db,
    ).plan.as_layer()  # fmt: skip
    book = moetune.open_planbook(old.id, db=db, renew=True)
    (plan,) = book.plans
    assert (plan.inputs.world_size, plan.inputs.tokens_per_rank) == (1, 360)
    assert (plan.inputs.layer, plan.inputs.dtype) == (old.inputs.layer, old.inputs.dtype)
    assert plan.inputs.constraints == old.inputs.constraints
    with open_store(db, read_only=True) as store:
        assert {stored.id for stored in store.plans()} == {old.id, plan.id}
    assert moetune.open_planbook(plan.id, db=db, renew=True).plans == (plan,)
    assert [stored.id for stored in moetune.open_planbook(old.id, db=db).plans] == [old.id]


def test_a_configured_service_is_asked() -> None:
    old = small_plan(layer=SHAPE, world_size=2, tokens=40)

    def answer(exchange: Exchange, seen: Seen) -> None:
        if seen.path == f"/v1/plans/{old.id}":
            exchange.plan(old)
            return
        wanted = {"world_size": 1, "tokens_per_rank": 80, "profile": "test", "dtype": "float32"}
        assert seen.document.items() >= wanted.items()
        assert "profile_fingerprint" not in seen.document
        exchange.plan(ALONE)

    with serving(answer) as stub:
        book = moetune.open_planbook([old.id], service=stub.url, renew=True)
        assert [call.path for call in stub.seen] == [f"/v1/plans/{old.id}", "/v1/plans:resolve"]
    assert book.plans == (ALONE,)


def test_without_the_profile_layers_warn_of_a_chunk(caplog: pytest.LogCaptureFixture) -> None:
    old = small_plan(layer=SHAPE, world_size=2)
    with caplog.at_level(logging.WARNING, "moetune"):
        book = moetune.open_planbook(old, renew=True)
    assert book.plans == ()
    (record,) = caplog.records
    assert "run one chunk" in record.getMessage()
    assert "'test'" in record.getMessage()


def test_plans_that_nobody_names_are_not_renewed() -> None:
    with pytest.raises(InputError, match="renew needs"):
        moetune.open_planbook(renew=True)
