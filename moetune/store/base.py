"""Base of the store's parts: one open database, and the statements that several parts share."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, Table

from moetune.store.database import Database
from moetune.store.migrate import check_ready

_LARGEST_ID = 2**31 - 1  # of an Integer column


class DatabaseStore:
    """One open database. Every method of a store is one transaction.

    Several threads may share it; another process opens its own, also after a fork.
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
        """The address of the rows, without a password."""
        return self._database.address.shown

    def check_ready(self) -> None:
        """Raise unless the database can be read and written now; nothing is written."""
        check_ready(self._database)

    def _rows(self, query: Select[Any]) -> Sequence[RowMapping]:
        return self._database.read(lambda connection: connection.execute(query).mappings().all())

    def _page(
        self, query: Select[Any], number: ColumnElement[int], *, after: int, limit: int
    ) -> Sequence[RowMapping]:
        """Return the rows before the number `after`, 0 for the newest, newest first."""
        if after:
            query = query.where(number < min(after, _LARGEST_ID))
        return self._rows(query.order_by(number.desc()).limit(limit))


def insert_missing(connection: Connection, table: Table, values: dict[str, Any]) -> None:
    """Append the row unless one with its key is there."""
    if connection.dialect.name == "postgresql":  # slow to import, and most stores are SQLite
        from sqlalchemy.dialects.postgresql import insert
    else:
        from sqlalchemy.dialects.sqlite import insert  # type: ignore[assignment]
    connection.execute(insert(table).values(values).on_conflict_do_nothing())
