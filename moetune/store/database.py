"""One open database: transactions that fail with one clear error.

One that meets a lost connection or a conflict is run once more: a connection of the pool may be
lost long before it is used.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from moetune.domain.errors import StoreUnavailableError
from moetune.store import faults
from moetune.store.address import Address
from moetune.store.engine import Opening, make_engine, reading, without_transaction

T = TypeVar("T")
_TURN_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """An address with its engine. Open one in each process: it does not survive a fork.

    Args:
        reader: the same engine for transactions that only read.
        turn_seconds: longest wait for other threads that write.
        turn: held by the thread that writes. SQLite has one writer at a time and polls for its
            lock with sleeps: threads that wait here instead are faster, and take turns.
    """

    address: Address
    read_only: bool
    engine: Engine
    reader: Engine
    turn_seconds: float
    turn: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def connect(cls, address: Address, how: Opening = Opening()) -> "Database":  # noqa: B008
        """Return the database; nothing is read yet.

        Raises:
            MoetuneError: the PostgreSQL driver is not installed.
        """
        engine = make_engine(address, how)
        patience = how.patience_seconds
        return cls(
            address=address,
            read_only=how.read_only,
            engine=engine,
            reader=reading(engine),
            turn_seconds=_TURN_SECONDS if patience is None else patience / 2,
        )

    def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in one transaction and commit.

        Raises:
            MoetuneError: it failed; nothing of it was written unless the text says otherwise.
        """
        if self.address.path is None:
            return self._run(self.engine, work)
        if not self.turn.acquire(timeout=self.turn_seconds):
            raise StoreUnavailableError(
                f"database {self.address.shown} is busy: other threads of this process are writing",
                "try again",
            )
        try:
            return self._run(self.engine, work)
        finally:
            self.turn.release()

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work`, which only reads, in one transaction: it sees one state of the rows.

        Raises:
            MoetuneError: it failed.
        """
        return self._run(self.reader, work)

    def outside(self, work: Callable[[Connection], T]) -> T:
        """Run `work`, such as pragmas and VACUUM, outside of a transaction.

        Raises:
            MoetuneError: it failed.
        """
        return self._run(without_transaction(self.engine), work)

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()

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
                raise self._unknown_outcome() from error
            raise
        except SQLAlchemyError as error:
            raise faults.translate(error, self.address) from error
        except (OverflowError, ValueError) as error:
            raise faults.unstorable(error, self.address) from error
        return result

    def _unknown_outcome(self) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"database {self.address.shown} was lost while a change was committed: "
            "it may or may not be stored",
            "look with `moetune profiles list` or `moetune db check` before you try again",
        )
