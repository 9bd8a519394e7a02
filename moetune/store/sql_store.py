"""The store of profiles, plans and observations in SQLite or PostgreSQL."""

import re
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from sqlalchemy import (
    Connection,
    RowMapping,
    Select,
    Text,
    and_,
    bindparam,
    cast,
    delete,
    func,
    insert,
    select,
    update,
)

from moetune.domain.cluster import Cluster, Fingerprint
from moetune.domain.errors import InputError
from moetune.domain.plan import Plan
from moetune.domain.profile import Profile
from moetune.domain.records import (
    FitInfo,
    MachineInfo,
    Observation,
    PlanInfo,
    RunInfo,
    RunStatus,
    Settled,
    Stored,
)
from moetune.domain.samples import Sample
from moetune.store import queries as pages
from moetune.store import queries as statements
from moetune.store import rows
from moetune.store.database import Database
from moetune.store.migrate import check_ready
from moetune.store.schema import fits, plans, runs, settled_sizes
from moetune.store.schema import observations as observed

_PREFIX = re.compile(r"[0-9a-f]{1,64}")
_DOCUMENT = select(cast(plans.c.document, Text)).where(plans.c.id == bindparam("plan_id"))
_DOCUMENTS = select(plans.c.id, cast(plans.c.document, Text)).where(
    plans.c.id.in_(bindparam("plan_ids", expanding=True))
)


class SqlStore:
    """Implements `moetune.domain.ports.Store`; made by `open_store`.

    Every method is one transaction and commits before it returns. Several threads may share a
    store; another process opens its own, also after a fork.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection."""
        self._database.close()

    @property
    def location(self) -> str:
        """Where the rows are, without a password."""
        return self._database.address.shown

    def start_run(self, *, name: str, cluster: Cluster, preset: str) -> int:
        """Append a running measurement under that profile name and return its id."""

        def work(connection: Connection) -> int:
            return statements.add_run(
                connection,
                machine=cluster.machine,
                fingerprint=cluster.fingerprint,
                values={
                    "name": name,
                    "provenance": "measured",
                    "preset": preset,
                    "status": "running",
                },
            )

        return self._database.write(work)

    def open_run(self, *, name: str, fingerprint: Fingerprint) -> int | None:
        """Return the latest unfinished run of that name with that fingerprint, to resume it."""
        return self._database.read(
            lambda connection: statements.latest_open_run(connection, name, fingerprint)
        )

    def add_samples(self, run_id: int, samples: Sequence[Sample]) -> None:
        """Append samples to the run, all or none.

        Raises:
            InputError: there is no such run.
        """

        def work(connection: Connection) -> None:
            statements.require_run(connection, run_id)
            statements.add_samples(connection, run_id, samples)

        self._database.write(work)

    def samples(self, run_id: int) -> tuple[Sample, ...]:
        """Return the run's samples in the order they were measured.

        Raises:
            InputError: there is no such run.
        """

        def work(connection: Connection) -> tuple[Sample, ...]:
            statements.require_run(connection, run_id)
            return statements.samples_of(connection, run_id, self.location)

        return self._database.read(work)

    def finish_run(self, run_id: int, *, status: RunStatus) -> None:
        """Close the run.

        Raises:
            InputError: there is no such run.
        """

        def work(connection: Connection) -> None:
            statements.require_run(connection, run_id)
            connection.execute(update(runs).where(runs.c.id == run_id).values(status=status))

        self._database.write(work)

    def save_profile(self, profile: Profile, *, run_id: int | None = None) -> None:
        """Append the fitted or imported profile: the newest of its name is the current one.

        Args:
            run_id: the run it was fitted to, whose samples so far are the profile's; None for
                an imported one, whose own samples are kept as a run of their own.

        Raises:
            InputError: there is no such run, or the profile's samples are others than its.
        """
        self._database.write(
            lambda connection: statements.add_fit(connection, profile, run_id, self.location)
        )

    def profile(self, name: str) -> Profile | None:
        """Return the current profile of that name, with its samples."""
        return self._database.read(
            lambda connection: statements.current_profile(connection, name, self.location)
        )

    def current_fit(self, name: str) -> int | None:
        """Return the number of that profile's fit, None where there is none of that name."""
        query = select(func.max(fits.c.id)).where(fits.c.name == name)
        found: int | None = self._database.read(lambda one: one.execute(query).scalar())
        return found

    def runs(self) -> tuple[RunInfo, ...]:
        """Return every run, newest first."""
        return self._database.read(pages.all_runs)

    def machines(self, *, after: int = 0, limit: int = 50) -> tuple[MachineInfo, ...]:
        """Return a page of the machines, newest first."""
        return self._database.read(partial(pages.machines_page, after=after, limit=limit))

    def fits(self, *, after: int = 0, limit: int = 50) -> tuple[FitInfo, ...]:
        """Return a page of the fits, newest first."""
        return self._database.read(partial(pages.fits_page, after=after, limit=limit))

    def remove_profile(self, name: str) -> int:
        """Delete every run and fit of that name and return how many runs there were."""

        def work(connection: Connection) -> int:
            connection.execute(delete(fits).where(fits.c.name == name))
            return connection.execute(delete(runs).where(runs.c.name == name)).rowcount

        return self._database.write(work)

    def save_plan(self, plan: Plan) -> None:
        """Append the plan; one of the same inputs by an older moetune gives way to it.

        Observations keep what was predicted when they were made.
        """
        self._database.write(lambda connection: statements.keep_plan(connection, plan))

    def plan(self, plan_id: str) -> Plan | None:
        """Return the plan whose id starts with `plan_id`.

        Raises:
            InputError: several do.
        """
        if not _PREFIX.fullmatch(plan_id):
            return None
        # Not LIKE, which no index answers; "g" follows the last digit.
        mine = and_(plans.c.id >= plan_id, plans.c.id < f"{plan_id}g")
        found = self._rows(select(plans).where(mine).order_by(plans.c.id).limit(5))
        if len(found) > 1:
            names = ", ".join(row["id"][: len(plan_id) + 8] for row in found)
            raise InputError(f"plan id {plan_id!r} is ambiguous", f"give more of it: {names}")
        return rows.plan_from_row(found[0], self.location) if found else None

    def plan_document(self, plan_id: str) -> str | None:
        """Return the canonical JSON of the plan with exactly this id, as it is stored."""
        wanted = {"plan_id": plan_id}
        found: str | None = self._database.read(
            lambda connection: connection.execute(_DOCUMENT, wanted).scalar()
        )
        return found

    def plan_documents(self, plan_ids: Sequence[str]) -> dict[str, str]:
        """Return the canonical JSON of the plans with exactly these ids, those that are stored."""
        wanted = {"plan_ids": list(plan_ids)}
        found = self._database.read(lambda connection: connection.execute(_DOCUMENTS, wanted).all())
        return {row[0]: row[1] for row in found}

    def plans(self) -> tuple[PlanInfo, ...]:
        """Return every plan, newest first."""
        return self._database.read(pages.plans_page)

    def plan_page(self, *, after: str = "", limit: int = 50) -> tuple[PlanInfo, ...]:
        """Return a page of the plans, newest first.

        Raises:
            NotFoundError: there is no plan `after`.
        """
        return self._database.read(partial(pages.plans_page, after=after, limit=limit))

    def add_observation(self, observation: Observation) -> None:
        """Append one observation.

        Raises:
            InputError: its plan is not stored.
        """
        self.add_observations((observation,))

    def add_observations(self, observations: Sequence[Observation]) -> None:
        """Append observations, all or none.

        Raises:
            InputError: a plan is not stored; the text names the first one.
        """
        values = [rows.observation_values(one) for one in observations]

        def work(connection: Connection) -> None:
            plan_ids = [one.plan_id for one in observations]
            statements.require_plans(connection, plan_ids, self.location)
            connection.execute(insert(observed), values)

        if values:
            self._database.write(work)

    def observation_page(
        self, plan_id: str | None, *, after: int = 0, limit: int = 200
    ) -> tuple[Stored[Observation], ...]:
        """Return a page of the observations of a plan, or of all for None, newest first."""
        return self._database.read(
            lambda connection: pages.observations_page(
                connection, plan_id, after=after, limit=limit
            )
        )

    def observations(self, plan_id: str) -> tuple[Observation, ...]:
        """Return the plan's observations, oldest first."""
        names = Observation.__dataclass_fields__
        query = (
            select(*(observed.c[name] for name in names))
            .where(observed.c.plan_id == plan_id)
            .order_by(observed.c.id)
        )
        return tuple(rows.observation_from_row(row) for row in self._rows(query))

    def add_settled(self, settled: Settled) -> None:
        """Append what a search decided; earlier decisions for the same size stay.

        Raises:
            InputError: its plan is not stored.
        """

        def work(connection: Connection) -> None:
            statements.require_plans(connection, (settled.plan_id,), self.location)
            connection.execute(insert(settled_sizes).values(rows.settled_values(settled)))

        self._database.write(work)

    def settled(self, plan_id: str) -> tuple[Settled, ...]:
        """Return what searches decided that began with the plan, oldest first."""
        mine = settled_sizes.c.plan_id == plan_id
        query = select(settled_sizes).where(mine).order_by(settled_sizes.c.id)
        return tuple(rows.settled_from_row(row, self.location) for row in self._rows(query))

    def check_ready(self) -> None:
        """Return where the database can be read and written now; nothing is written.

        Raises:
            StoreUnavailableError: it is locked, full or away.
            SchemaMismatchError: it has another schema.
        """
        check_ready(self._database)

    def _rows(self, query: Select[Any]) -> Sequence[RowMapping]:
        return self._database.read(lambda connection: connection.execute(query).mappings().all())
