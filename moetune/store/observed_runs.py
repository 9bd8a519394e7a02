"""Observed runs of whole models, which calibrate predictions of the same machine and runtime."""

from collections.abc import Sequence

from sqlalchemy import Connection, delete, insert, select

from moetune.domain.errors import NotFoundError
from moetune.domain.records import ObservedRun, Stored
from moetune.store import rows
from moetune.store.database import NOTHING_REMOVED, Database, first_missing, reads, writes
from moetune.store.schema import observed_runs


class ObservedRunStore(Database):
    """Observed runs."""

    @writes
    def add_observed_run(self, connection: Connection, run: ObservedRun) -> int:
        """Append a run and return its id."""
        query = insert(observed_runs).values(rows.columns(run)).returning(observed_runs.c.id)
        return int(connection.execute(query).scalar_one())

    @reads
    def observed_runs(
        self,
        connection: Connection,
        *,
        profile: str | None = None,
        profile_fingerprint: str | None = None,
        target: str | None = None,
        plan_id: str | None = None,
        after: int = 0,
        limit: int | None = None,
    ) -> tuple[Stored[ObservedRun], ...]:
        """Return runs before the id `after` (0: all), newest first; None in a filter allows any."""
        wanted = {
            "profile": profile, "profile_fingerprint": profile_fingerprint, "target": target,
            "plan_id": plan_id,
        }  # fmt: skip
        query = select(observed_runs).order_by(observed_runs.c.id.desc()).limit(limit)
        if after:
            query = query.where(observed_runs.c.id < after)
        for name, value in wanted.items():
            if value is not None:
                query = query.where(observed_runs.c[name] == value)
        stored = connection.execute(query).mappings()
        return tuple(rows.stored(ObservedRun, row, f"{self.location}: run") for row in stored)

    @writes
    def remove_observed_runs(self, connection: Connection, numbers: Sequence[int]) -> int:
        """Delete the runs of these ids and return how many there were.

        Raises:
            NotFoundError: a run is not stored; then none is deleted.
        """
        number = observed_runs.c.id
        if (missing := first_missing(connection, number, numbers)) is not None:
            raise NotFoundError(f"there is no observed run r{missing}", NOTHING_REMOVED)
        return connection.execute(delete(observed_runs).where(number.in_(numbers))).rowcount
