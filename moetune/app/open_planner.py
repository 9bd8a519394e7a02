"""Planners opened with their stores: the service's, and the command line's."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from moetune.app import wiring
from moetune.app.plan import NewPlan
from moetune.app.planner import Planner
from moetune.app.profiles import is_path
from moetune.app.solvers import Solver, ThreadSolver
from moetune.app.sources import LocalSources, StoredSources
from moetune.config import Settings
from moetune.domain.any_plan import AnyPlan
from moetune.domain.errors import InputError, MoetuneError
from moetune.domain.profile import Profile
from moetune.domain.question import Question

if TYPE_CHECKING:
    from moetune.store import SqlStore

PATIENCE_SECONDS = 5.0
"""Longest wait of the service for a lock on the database."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServicePlanner(Planner):
    """A planner with open stores, which the service also lists and writes rows of.

    Args:
        reading: the same database as `store`, opened read-only.
    """

    store: "SqlStore"
    reading: "SqlStore"

    def save(self, plan: AnyPlan) -> None:
        """Store a plan; one that is there already stays."""
        self.store.save_plan(plan)

    def problems(self) -> tuple[str, ...]:
        """Return the reasons why the database cannot be used now; empty when it can."""
        found = []
        for store in (self.store, self.reading):
            try:
                store.check_ready()
            except MoetuneError as error:
                found.append(f"{error.what}: {error.hint}" if error.hint else error.what)
        return tuple(dict.fromkeys(found))


@contextmanager
def open_planner(settings: Settings, *, solver: Solver | None = None) -> Iterator[ServicePlanner]:
    """Open the service's planner; a database is made where there is none.

    Args:
        solver: None to solve in the calling threads.

    Raises:
        InputError: the setting `profile` is a file.
        SchemaMismatchError: the database has another schema.
        MoetuneError: it cannot be opened, or made.
    """
    if settings.profile is not None and is_path(settings.profile):
        raise InputError(
            f"the setting profile is the file {settings.profile}, and the service plans only with "
            "profiles of the store",
            f"import it with `moetune profiles import {settings.profile}`, and name it",
        )
    with (
        wiring.open_store(settings, patience_seconds=PATIENCE_SECONDS) as store,
        wiring.open_store(settings, read_only=True, patience_seconds=PATIENCE_SECONDS) as reading,
    ):
        sources = StoredSources(store=store, reading=reading, default_profile=settings.profile)
        yield ServicePlanner(
            sources=sources, settings=settings, solver=solver or ThreadSolver(), store=store,
            reading=reading,
        )  # fmt: skip


@contextmanager
def local_planner(
    settings: Settings, *, profile: str | Profile | None = None, saves: bool = False
) -> Iterator[Planner]:
    """Open the command line's planner: it also reads files, and opens the store when needed.

    Args:
        profile: file, name or the profile itself; None for the setting with new plans, and for a
            known plan's own.
        saves: store new plans; a database is made where there is none.

    Raises:
        SchemaMismatchError: the database has another schema.
        MoetuneError: it cannot be opened, or made.
    """
    with ExitStack() as stack:
        store = stack.enter_context(wiring.open_store(settings)) if saves else None
        stores = (
            partial(wiring.find_store, settings) if store is None else partial(nullcontext, store)
        )
        sources = LocalSources(
            stores=stores, store=store, named=profile, default_profile=settings.profile
        )
        yield Planner(sources=sources, settings=settings)


def plan_question(
    question: Question, settings: Settings, *, profile: str | Profile | None, save: bool
) -> NewPlan:
    """Return the plan of a layer or of a whole model's training, and its profile.

    Args:
        profile: a file, a name or a profile; None for the setting, else the newest measured one.
        save: store the plan; a database is made where there is none.

    Raises:
        MoetuneError: as of `Planner.ask`, or the database cannot be opened.
    """
    with local_planner(settings, profile=profile, saves=save) as planner:
        planned = planner.ask(question)
        planner.sources.save(planned.plan)
    return planned
