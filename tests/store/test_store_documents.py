"""Plan documents by id: as they are stored, many at a time."""

from collections.abc import Callable

from moetune.domain.document import canonical_json
from moetune.domain.plan import Plan
from moetune.store import SqlStore


def test_documents_are_those_of_the_ids_that_are_stored(
    store: SqlStore, make_plan: Callable[..., Plan]
) -> None:
    plans = [make_plan(tokens) for tokens in (1, 2, 3)]
    for plan in plans:
        store.save_plan(plan)
    wanted = [plans[0].id, plans[2].id, "ab" * 32, plans[1].id[:32], "'; --"]
    assert store.plan_documents(wanted) == {
        plan.id: canonical_json(plan) for plan in (plans[0], plans[2])
    }
    assert store.plan_documents(()) == {}
    assert all(store.plan_document(one.id) == canonical_json(one) for one in plans)
