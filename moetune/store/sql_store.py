"""The store of profiles, plans and observations in SQLite or PostgreSQL."""

import re
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from sqlalchemy import Connection, RowMapping, Select, delete, func, insert, select, update

from moetune.domain.document import canonical_json
from moetune.domain.errors import InputError
from moetune.domain.hardware import Cluster, Fingerprint
from moetune.domain.plan import Plan
from moetune.domain.ports import Observation, PlanInfo, RunInfo, RunStatus, Settled
from moetune.domain.profile import Profile
from moetune.domain.samples import Sample
from moetune.store import rows, statements
from moetune.store.database import Database
from moetune.store.schema import (
    fits,
    machines,
    observations,
    plans,
    runs,
    samples,
    settled_sizes,
)

_PREFIX = re.compile(r"[0-9a-f]{1,64}")


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
        query = (
            select(runs.c.id, runs.c.software)
            .join(machines)
            .where(
                runs.c.name == name,
                runs.c.provenance == "measured",
                runs.c.status != "complete",
                machines.c.hardware_id == fingerprint.hardware_id,
            )
            .order_by(runs.c.id.desc())
            .limit(1)
        )
        row = self._database.read(lambda connection: connection.execute(query).first())
        if row is None or row.software != dict(fingerprint.software):
            return None
        return int(row.id)

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

        def work(connection: Connection) -> None:
            if run_id is None:
                fit_run_id = statements.import_run(connection, profile)
            else:
                fit_run_id = run_id
                statements.require_run(connection, run_id)
                kept = statements.samples_of(connection, run_id, self.location)
                if profile.samples not in ((), kept):
                    raise InputError(
                        f"profile {profile.name!r} has other samples than run {run_id}",
                        "add them to the run first",
                    )
            last = select(func.max(samples.c.id)).where(samples.c.run_id == fit_run_id)
            connection.execute(
                insert(fits).values(
                    run_id=fit_run_id,
                    name=profile.name,
                    document=rows.profile_document(profile),
                    last_sample_id=connection.execute(last).scalar() or 0,
                    created_at=rows.utc_now(),
                )
            )

        self._database.write(work)

    def profile(self, name: str) -> Profile | None:
        """Return the current profile of that name, with its samples."""
        query = select(fits).where(fits.c.name == name).order_by(fits.c.id.desc()).limit(1)

        def work(connection: Connection) -> Profile | None:
            fit = connection.execute(query).mappings().first()
            if fit is None:
                return None
            measured = statements.samples_of(
                connection, fit["run_id"], self.location, last_id=fit["last_sample_id"]
            )
            return rows.profile_from_parts(
                fit["document"], measured, f"{self.location}: profile {name!r}"
            )

        return self._database.read(work)

    def runs(self) -> tuple[RunInfo, ...]:
        """Return every run, newest first."""
        count = (
            select(func.count()).where(samples.c.run_id == runs.c.id).correlate(runs)
        ).scalar_subquery()
        query = (
            select(
                *(runs.c[name] for name in ("id", "name", "provenance", "preset", "status")),
                runs.c.created_at,
                machines.c.device,
                machines.c.num_devices,
                count.label("num_samples"),
            )
            .join(machines)
            .order_by(runs.c.id.desc())
        )
        return tuple(rows.run_info(row) for row in self._rows(query))

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

        def work(connection: Connection) -> None:
            values = rows.plan_values(plan)
            statements.insert_missing(connection, plans, values)
            mine = plans.c.id == plan.id
            stored = connection.execute(select(plans.c.document).where(mine)).scalar_one()
            if canonical_json(stored) != canonical_json(plan):
                connection.execute(update(plans).where(mine).values(values))

        self._database.write(work)

    def plan(self, plan_id: str) -> Plan | None:
        """Return the plan whose id starts with `plan_id`.

        Raises:
            InputError: several do.
        """
        if not _PREFIX.fullmatch(plan_id):
            return None
        query = select(plans).where(plans.c.id.startswith(plan_id)).order_by(plans.c.id).limit(5)
        found = self._rows(query)
        if len(found) > 1:
            names = ", ".join(row["id"][: len(plan_id) + 8] for row in found)
            raise InputError(f"plan id {plan_id!r} is ambiguous", f"give more of it: {names}")
        return rows.plan_from_row(found[0], self.location) if found else None

    def plans(self) -> tuple[PlanInfo, ...]:
        """Return every plan, newest first."""
        names = ("id", "model", "profile", "world_size", "tokens_per_rank", "created_at")
        query = select(*(plans.c[name] for name in names)).order_by(
            plans.c.created_at.desc(), plans.c.id
        )
        return tuple(rows.plan_info(row) for row in self._rows(query))

    def add_observation(self, observation: Observation) -> None:
        """Append one observation.

        Raises:
            InputError: its plan is not stored.
        """

        def work(connection: Connection) -> None:
            statements.require_plan(connection, observation.plan_id, self.location)
            connection.execute(insert(observations).values(rows.observation_values(observation)))

        self._database.write(work)

    def observations(self, plan_id: str) -> tuple[Observation, ...]:
        """Return the plan's observations, oldest first."""
        names = Observation.__dataclass_fields__
        query = (
            select(*(observations.c[name] for name in names))
            .where(observations.c.plan_id == plan_id)
            .order_by(observations.c.id)
        )
        return tuple(rows.observation_from_row(row) for row in self._rows(query))

    def add_settled(self, settled: Settled) -> None:
        """Append what a search decided; earlier decisions for the same size stay.

        Raises:
            InputError: its plan is not stored.
        """

        def work(connection: Connection) -> None:
            statements.require_plan(connection, settled.plan_id, self.location)
            connection.execute(insert(settled_sizes).values(rows.settled_values(settled)))

        self._database.write(work)

    def settled(self, plan_id: str) -> tuple[Settled, ...]:
        """Return what searches decided that began with the plan, oldest first."""
        mine = settled_sizes.c.plan_id == plan_id
        query = select(settled_sizes).where(mine).order_by(settled_sizes.c.id)
        return tuple(rows.settled_from_row(row, self.location) for row in self._rows(query))

    def _rows(self, query: Select[Any]) -> Sequence[RowMapping]:
        return self._database.read(lambda connection: connection.execute(query).mappings().all())
