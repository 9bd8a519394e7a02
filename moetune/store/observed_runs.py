"""Observed runs of whole models, which calibrate predictions of the same machine and runtime."""

from collections.abc import Sequence

from sqlalchemy import Connection, delete, insert, select

from moetune.domain.document import decode, encode
from moetune.domain.errors import NotFoundError
from moetune.domain.records import ObservedRun, Stored
from moetune.store import rows
from moetune.store.database import Database, reads, writes
from moetune.store.schema import observed_runs


class ObservedRunStore(Database):
    """Observed runs."""

    @writes
    def add_observed_run(self, connection: Connection, run: ObservedRun) -> int:
        """Append a run and return its id."""
        values = {**encode(run), "created_at": rows.utc_now()}
        added = connection.execute(
            insert(observed_runs).values(values).returning(observed_runs.c.id)
        )
        return int(added.scalar_one())

    @reads
    def observed_runs(
        self,
        connection: Connection,
        *,
        profile: str | None = None,
        profile_fingerprint: str | None = None,
        target: str | None = None,
        plan_id: str | None = None,
        limit: int | None = None,
    ) -> tuple[Stored[ObservedRun], ...]:
        """Return runs, newest first; None stands for any."""
        wanted = {
            "profile": profile, "profile_fingerprint": profile_fingerprint, "target": target,
            "plan_id": plan_id,
        }  # fmt: skip
        query = select(observed_runs).order_by(observed_runs.c.id.desc()).limit(limit)
        for name, value in wanted.items():
            if value is not None:
                query = query.where(observed_runs.c[name] == value)
        stored = []
        for row in connection.execute(query).mappings():
            values = dict(row)
            number, created_at = values.pop("id"), values.pop("created_at")
            run = decode(ObservedRun, values, f"{self.location}: run {number}")
            stored.append(Stored(id=number, created_at=created_at, value=run))
        return tuple(stored)

    @writes
    def remove_observed_runs(self, connection: Connection, numbers: Sequence[int]) -> int:
        """Delete the runs of these ids and return how many there were.

        Raises:
            NotFoundError: a run is not stored; then none is deleted.
        """
        mine = observed_runs.c.id.in_(numbers)
        stored = {*connection.scalars(select(observed_runs.c.id).where(mine))}
        for number in numbers:
            if number not in stored:
                raise NotFoundError(f"there is no observed run r{number}", "nothing was removed")
        return connection.execute(delete(observed_runs).where(mine)).rowcount
