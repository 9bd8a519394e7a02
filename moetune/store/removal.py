"""Removal of plans and observations, by id or by age, and the size of what is stored."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, exists, func, or_, select, text

from moetune.domain.errors import NotFoundError
from moetune.domain.records import Removed
from moetune.store.base import DatabaseStore
from moetune.store.schema import metadata, observations, plans, settled_sizes

_NOTHING_REMOVED = "nothing was removed"
_Condition = ColumnElement[bool]
_TABLES = (plans, observations, settled_sizes)
_SQLITE_BYTES = text(
    "SELECT (p.page_count - f.freelist_count) * s.page_size FROM pragma_page_count AS p, "
    "pragma_freelist_count AS f, pragma_page_size AS s"
)
_POSTGRESQL_BYTES = text("SELECT pg_total_relation_size(cast(:name AS regclass))")


class RemovalStore(DatabaseStore):
    """Removal of plans and observations."""

    def remove_plans(self, plan_ids: Sequence[str]) -> Removed:
        """Delete plans with exactly these ids, and what was observed and settled under them.

        Raises:
            NotFoundError: a plan is not stored; then none is deleted.
        """
        wanted = list(dict.fromkeys(plan_ids))
        children = [one.c.plan_id.in_(wanted) for one in (observations, settled_sizes)]

        def work(connection: Connection) -> Removed:
            mine = plans.c.id.in_(wanted)
            found = set(connection.execute(select(plans.c.id).where(mine)).scalars())
            for plan_id in wanted:
                if plan_id not in found:
                    raise NotFoundError(f"there is no plan {plan_id[:12]!r}", _NOTHING_REMOVED)
            return _delete(connection, mine, *children)

        return self._database.write(work)

    def remove_observations(self, numbers: Sequence[int]) -> int:
        """Delete the observations of these ids and return how many there were.

        Raises:
            NotFoundError: an observation is not stored; then none is deleted.
        """
        wanted = list(dict.fromkeys(numbers))
        mine = observations.c.id.in_(wanted)

        def work(connection: Connection) -> int:
            found = set(connection.execute(select(observations.c.id).where(mine)).scalars())
            for number in wanted:
                if number not in found:
                    raise NotFoundError(f"there is no observation {number}", _NOTHING_REMOVED)
            return connection.execute(delete(observations).where(mine)).rowcount

        return self._database.write(work)

    def prune(self, before: str, *, dry_run: bool = False) -> Removed:
        """Delete what is older, and plans that nothing newer was observed or settled under.

        Args:
            before: UTC, ISO 8601, as of `Stored`.
            dry_run: count only.
        """
        later = [
            exists().where(one.c.plan_id == plans.c.id, one.c.created_at >= before)
            for one in (observations, settled_sizes)
        ]
        old = (
            (plans.c.created_at < before) & ~or_(*later),
            observations.c.created_at < before,
            settled_sizes.c.created_at < before,
        )
        if dry_run:
            return self._database.read(lambda connection: _count(connection, *old))
        return self._database.write(lambda connection: _delete(connection, *old))

    def compact(self) -> None:
        """Give the space of deleted rows back."""

        def work(connection: Connection) -> None:
            if connection.dialect.name == "sqlite":
                connection.exec_driver_sql("VACUUM")
                return
            for one in (observations, settled_sizes, plans):
                connection.exec_driver_sql(f"VACUUM FULL {one.name}")

        self._database.outside(work)

    def size_bytes(self) -> int:
        """Return the bytes of rows and indices: in SQLite of all pages that are in use."""

        def work(connection: Connection) -> int:
            if connection.dialect.name == "sqlite":
                return int(connection.execute(_SQLITE_BYTES).scalar_one())
            return sum(
                int(connection.execute(_POSTGRESQL_BYTES, {"name": name}).scalar_one())
                for name in metadata.tables
            )

        return self._database.read(work)


def _delete(connection: Connection, *where: _Condition) -> Removed:
    """Delete rows of the plans, observations and settled sizes; the plans last."""
    numbers = [
        connection.execute(delete(table).where(one)).rowcount
        for table, one in reversed(tuple(zip(_TABLES, where, strict=True)))
    ]
    return _removed(numbers[::-1])


def _count(connection: Connection, *where: _Condition) -> Removed:
    queries = [
        select(func.count()).select_from(table).where(one)
        for table, one in zip(_TABLES, where, strict=True)
    ]
    return _removed([connection.execute(query).scalar_one() for query in queries])


def _removed(numbers: Sequence[Any]) -> Removed:
    of_plans, of_observations, of_settled = map(int, numbers)
    return Removed(plans=of_plans, observations=of_observations, settled=of_settled)
