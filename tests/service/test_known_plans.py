"""Plans that are asked for at one time are read together, and nobody takes another's answer."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from moetune.app.planner import ServicePlanner
from moetune.domain.document import canonical_json
from moetune.domain.errors import StoreUnavailableError
from moetune.service.metrics import Metrics
from moetune.service.workers import WorkerPools
from moetune.store import SqlStore


@pytest.fixture
def plan_ids(planner: ServicePlanner, inputs: dict[str, Any]) -> list[str]:
    made = (planner.resolve({**inputs, "tokens_per_rank": tokens}) for tokens in (1024, 2048))
    return [plan.id for plan in made]


def stored(planner: ServicePlanner, plan_id: str) -> str | None:
    row = planner.reading.plan(plan_id)
    return None if row is None else canonical_json(row)


@dataclass(frozen=True)
class LookUps:
    """Every look-up; each waits until the gate is open."""

    ids: list[Sequence[str]] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)
    gate: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def look_ups(monkeypatch: pytest.MonkeyPatch) -> LookUps:
    real, seen = SqlStore.plan_documents, LookUps()

    def read(store: SqlStore, ids: Sequence[str]) -> dict[str, str]:
        seen.ids.append(ids)
        seen.begun.set()
        seen.gate.wait(timeout=120)
        return real(store, ids)

    monkeypatch.setattr(SqlStore, "plan_documents", read)
    return seen


def test_who_comes_during_a_look_up_shares_the_next(
    planner: ServicePlanner, plan_ids: list[str], look_ups: LookUps
) -> None:
    first, second = plan_ids
    unknown = "ab" * 32

    async def ask() -> list[str | None]:
        pools = WorkerPools(planner=planner, metrics=Metrics(planner))
        begun = asyncio.create_task(pools.plan_document(first))
        await asyncio.to_thread(look_ups.begun.wait, 30)
        more = [
            asyncio.create_task(pools.plan_document(name)) for name in (second, unknown, first) * 50
        ]
        await asyncio.sleep(0)
        look_ups.gate.set()
        return [await task for task in (begun, *more)]

    documents = asyncio.run(ask())
    wanted = [stored(planner, plan_id) for plan_id in (second, unknown, first)]
    assert documents == [stored(planner, first), *wanted * 50]
    assert [sorted(ids) for ids in look_ups.ids] == [[first], sorted((second, unknown, first))]


def test_who_goes_away_takes_no_other_answer_along(
    planner: ServicePlanner, plan_ids: list[str], look_ups: LookUps
) -> None:

    async def ask() -> str | None:
        pools = WorkerPools(planner=planner, metrics=Metrics(planner))
        leaves, stays = (asyncio.create_task(pools.plan_document(plan_ids[0])) for _ in range(2))
        await asyncio.to_thread(look_ups.begun.wait, 30)
        leaves.cancel()
        await asyncio.wait([leaves])
        look_ups.gate.set()
        return await stays

    assert asyncio.run(ask()) == stored(planner, plan_ids[0])


def test_an_error_reaches_everybody_and_the_next_look_up_works(
    planner: ServicePlanner, plan_ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> dict[str, str]:
        raise StoreUnavailableError("the database is away", "wait")

    async def ask() -> tuple[list[Any], str | None]:
        pools = WorkerPools(planner=planner, metrics=Metrics(planner))
        with monkeypatch.context() as patched:
            patched.setattr(SqlStore, "plan_documents", fail)
            errors = await asyncio.gather(
                *(pools.plan_document(plan_id) for plan_id in plan_ids * 3), return_exceptions=True
            )
        return errors, await pools.plan_document(plan_ids[0])

    errors, document = asyncio.run(ask())
    assert [type(error) for error in errors] == [StoreUnavailableError] * 6
    assert len({id(error) for error in errors}) == 6
    assert document == stored(planner, plan_ids[0])
