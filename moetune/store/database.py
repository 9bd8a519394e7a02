"""An open database, the base of the store: its transactions fail with a single clear error.

A transaction that meets a lost connection or a conflict is run once more. A connection of the
pool may be lost long before it is used.
"""

import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from sqlalchemy import ColumnElement, Connection, Engine, Table, select
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from moetune.domain.errors import StoreUnavailableError
from moetune.store import faults
from moetune.store.address import Address
from moetune.store.engine import Opening, make_engine, reading, without_transaction

NOTHING_REMOVED = "nothing was removed"
T = TypeVar("T")
K = TypeVar("K")
P = ParamSpec("P")
S = TypeVar("S", bound="Database")
_OPENING = Opening()


class Database:
    """An address with its engine, which several threads may share.

    Open one in each process: it does not survive a fork.

    Raises:
        MoetuneError: the PostgreSQL driver is not installed. Nothing is read yet.
    """

    def __init__(self, address: Address, how: Opening = _OPENING) -> None:
        self.address, self.how = address, how
        self.engine = make_engine(address, how)
        self._reader = reading(self.engine)
        # Held by the thread that writes. SQLite has one writer at a time and polls for its lock
        # with sleeps: threads that wait here instead are faster, and take turns.
        self._turn = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()

    @property
    def location(self) -> str:
        """The address, without a password."""
        return self.address.shown

    def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in a transaction; a MoetuneError says so if anything may be written."""
        if self.address.path is None:
            return self._run(self.engine, work)
        if not self._turn.acquire(timeout=self.how.turn_seconds):
            raise StoreUnavailableError(
                f"database {self.address.shown} is busy: other threads of this process are writing",
                "try again",
            )
        try:
            return self._run(self.engine, work)
        finally:
            self._turn.release()

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work`, which only reads, on a single snapshot of the rows; or raise MoetuneError."""
        return self._run(self._reader, work)

    def outside(self, work: Callable[[Connection], T]) -> T:
        """Run SQLite's pragmas outside of a transaction; raise as `read` does."""
        return self._run(without_transaction(self.engine), work)

    def _run(self, engine: Engine, work: Callable[[Connection], T]) -> T:
        try:
            return self._once(engine, work)
        except DBAPIError as error:
            if not faults.is_transient(error):
                raise faults.translate(error, self.address) from error
        try:
            return self._once(engine, work)
        except DBAPIError as error:
            raise faults.translate(error, self.address) from error

    def _once(self, engine: Engine, work: Callable[[Connection], T]) -> T:
        is_committing = False
        try:
            with engine.begin() as connection:
                result = work(connection)
                is_committing = engine is self.engine
        except DBAPIError as error:
            if is_committing and faults.is_lost(error):
                raise StoreUnavailableError(
                    f"database {self.address.shown} was lost while a change was committed: "
                    "it may or may not be stored",
                    "look with `moetune profiles list` or `moetune db check` before you try again",
                ) from error
            raise
        except SQLAlchemyError as error:
            raise faults.translate(error, self.address) from error
        except (OverflowError, ValueError) as error:
            raise faults.unstorable(error, self.address) from error
        return result


def reads(method: Callable[Concatenate[S, Connection, P], T]) -> Callable[Concatenate[S, P], T]:
    """Call a store's method in a transaction that only reads; see `Database.read`."""

    @wraps(method)
    def run(store: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return store.read(lambda connection: method(store, connection, *args, **kwargs))

    return run


def writes(method: Callable[Concatenate[S, Connection, P], T]) -> Callable[Concatenate[S, P], T]:
    """Call a store's method in a transaction that is committed; see `Database.write`."""

    @wraps(method)
    def run(store: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return store.write(lambda connection: method(store, connection, *args, **kwargs))

    return run


def first_missing(connection: Connection, key: ColumnElement[Any], wanted: Sequence[K]) -> K | None:
    """Return the first of the wanted keys that no row has; None if every key has a row."""
    stored = set(connection.scalars(select(key).where(key.in_(set(wanted)))))
    return next((value for value in wanted if value not in stored), None)


def insert_missing(connection: Connection, table: Table, values: dict[str, Any]) -> None:
    """Append the row unless the table has its key already."""
    if connection.dialect.name == "postgresql":  # slow to import, and most stores are SQLite
        from sqlalchemy.dialects.postgresql import insert
    else:
        from sqlalchemy.dialects.sqlite import insert  # type: ignore[assignment]
    connection.execute(insert(table).values(values).on_conflict_do_nothing())
