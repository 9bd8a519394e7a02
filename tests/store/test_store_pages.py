"""Lists in pages, documents and batches: the same on SQLite and on a real PostgreSQL."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moetune.domain.any_plan import plan_from_json
from moetune.domain.document import canonical_json
from moetune.domain.errors import BadStoreError, NotFoundError
from moetune.store import SqlStore, open_store, rows
from tests.store.values import execute, make_plan, make_profile

pytestmark = pytest.mark.unmeasured


def turn_pages(turn: Callable[..., tuple[Any, ...]], limit: int, first: Any) -> list[Any]:
    """Return all entries, page by page."""
    entries: list[Any] = []
    while page := turn(after=entries[-1].id if entries else first, limit=limit):
        assert len(page) <= limit
        entries += page
    return entries


def test_the_current_fit_changes_with_every_fit_and_never_comes_back(store: SqlStore) -> None:
    seen = set()
    for _ in range(3):
        store.save_profile(make_profile())
        seen.add(store.current_fit("h200-x8"))
    store.remove_profile("h200-x8")
    assert store.current_fit("h200-x8") is None
    store.save_profile(make_profile())
    seen.add(store.current_fit("h200-x8"))
    assert len(seen) == 4


def test_a_plans_document_is_the_canonical_json_of_exactly_that_id(store: SqlStore) -> None:
    plan = make_plan()
    store.save_plan(plan)
    document = store.plan_documents([plan.id])[plan.id]
    assert document == canonical_json(plan)
    assert plan_from_json(document, "it") == plan
    for other in (plan.id[:63], plan.id.upper(), "", "%", "ab" * 32, "'; --"):
        assert store.plan_documents([other]) == {}
    newer = make_plan(step_seconds=0.25)
    store.save_plan(newer)
    assert store.plan_documents([plan.id]) == {plan.id: canonical_json(newer)}


def test_plans_of_a_moment_have_pages(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "utc_now", lambda: "2026-01-01T00:00:00.000000+00:00")
    made = {make_plan(tokens).id for tokens in range(1, 12)}
    for tokens in range(1, 12):
        store.save_plan(make_plan(tokens))
    ids = [plan.id for plan in turn_pages(store.plans, 2, "")]
    assert len(ids) == len(made)
    assert set(ids) == made


def test_plans_are_chosen_by_model_profile_and_time(store: SqlStore) -> None:
    layer = make_plan(1)
    model, profile = (
        replace(layer, inputs=inputs, id=inputs.plan_id)
        for inputs in (
            replace(layer.inputs, model="bert-l", tokens_per_rank=2),
            replace(layer.inputs, profile="h200-x8", tokens_per_rank=3),
        )
    )
    for plan in (layer, model, profile):
        store.save_plan(plan)
    newest, second, oldest = store.plans()
    assert store.plans(model="bert-l") == (second,)
    assert store.plans(profile="h200-x8") == (newest,)
    assert store.plans(profile=oldest.profile, after=second.id) == (oldest,)
    assert store.plans(since=second.created_at) == (newest, second)
    assert store.plans(model="bert-l", profile="h200-x8") == ()


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(limit=st.integers(1, 4), comes=st.lists(st.integers(0, 2), min_size=12, max_size=12))
def test_what_comes_while_pages_are_turned_moves_nothing_between_them(
    store: SqlStore, limit: int, comes: list[int]
) -> None:
    numbers = itertools.count(1 + max((plan.tokens_per_rank for plan in store.plans()), default=0))

    def come() -> None:
        store.save_plan(make_plan(next(numbers)))

    for _ in range(3):
        come()
    plans = store.plans()
    waves = iter(comes)

    def while_others_come(turn: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        def page(**arguments: Any) -> tuple[Any, ...]:
            entries = turn(**arguments)
            for _ in range(next(waves, 0)):
                come()
            return entries

        return page

    assert turn_pages(while_others_come(store.plans), limit, "") == list(plans)


def test_a_page_after_a_plan_that_is_not_there_is_refused(store: SqlStore) -> None:
    store.save_plan(make_plan())
    for other in ("ab" * 32, make_plan().id[:63], "'", "%"):
        with pytest.raises(NotFoundError, match="no plan"):
            store.plans(after=other)


def test_a_page_reads_no_documents(url: str) -> None:
    with open_store(url) as store:
        for tokens in (1, 2):
            store.save_plan(make_plan(tokens))
        execute(url, "UPDATE plans SET document = '7'")
        assert len(store.plans()) == 2
        assert store.plan_documents([make_plan(1).id]) == {make_plan(1).id: "7"}
        with pytest.raises(BadStoreError, match="plan "):
            store.plan(make_plan(1).id)
