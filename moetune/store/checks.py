"""Check of what is stored: every document can be read, and holds times that can be shown."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from moetune.domain.errors import InputError
from moetune.domain.storable import check_observation, check_plan, check_profile, check_settled
from moetune.store.sql_store import SqlStore

_PAGE_SIZE = 1000


def document_problems(store: SqlStore) -> tuple[str, ...]:
    """Return what is wrong with documents and rows; each line names the row."""
    runs = store.runs()
    plans = store.plans()
    readings: tuple[Callable[[], object], ...] = (
        *(partial(store.samples, run.id) for run in runs),
        *(partial(_check_profile, store, name) for name in sorted({run.name for run in runs})),
        *(partial(_check_plan, store, plan.id) for plan in plans),
        *(partial(_check_settled, store, plan.id) for plan in plans),
    )
    problems = []
    for reading in readings:
        try:
            reading()
        except InputError as error:
            problems.append(error.what)
    return (*problems, *_observation_problems(store))


def _check_profile(store: SqlStore, name: str) -> None:
    if (profile := store.profile(name)) is not None:
        with _removable(f"profile {name!r}", f"moetune profiles remove {name}"):
            check_profile(profile)


def _check_plan(store: SqlStore, plan_id: str) -> None:
    with _removable(f"plan {plan_id[:12]}", f"moetune plans remove {plan_id[:12]}"):
        if (plan := store.plan(plan_id)) is not None:
            check_plan(plan)


def _check_settled(store: SqlStore, plan_id: str) -> None:
    for one in store.settled(plan_id):
        with _removable(
            f"a settled size of plan {plan_id[:12]}", f"moetune plans remove {plan_id[:12]}"
        ):
            check_settled(one)


def _observation_problems(store: SqlStore) -> Iterator[str]:
    """Yield what is wrong with observations, page by page: there may be millions of them."""
    after = 0
    while True:
        try:
            page = store.observation_page(None, after=after, limit=_PAGE_SIZE)
        except InputError as error:
            yield error.what
            return
        for one in page:
            try:
                with _removable(f"observation {one.id}", f"moetune observations remove {one.id}"):
                    check_observation(one.value)
            except InputError as error:
                yield error.what
        if len(page) < _PAGE_SIZE:
            return
        after = page[-1].id


@contextmanager
def _removable(what: str, command: str) -> Iterator[None]:
    """Name the row in an error, and the command that removes it."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{what}: {error.what}: `{command}` removes it") from None
