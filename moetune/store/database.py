"""One open database: transactions that are retried, and fail with one clear error."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from moetune.domain.errors import StoreUnavailableError
from moetune.store import faults
from moetune.store.address import Address
from moetune.store.engine import make_engine, reading, without_transaction

T = TypeVar("T")
_RETRY_DELAYS_SECONDS = (0.1, 0.5, 2.0)
# SQLite has already waited its busy timeout when it gives up: then there is no second wait.
_RETRY_BUDGET_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """An address with its engine. Open one in each process: it does not survive a fork.

    Args:
        reader: the same engine for transactions that only read.
        retry_seconds: a transaction that has taken longer is not run again.
        turn: held by the thread that writes. SQLite has one writer at a time and polls for its
            lock with sleeps: threads that wait here instead are faster, and take turns.
    """

    address: Address
    read_only: bool
    engine: Engine
    reader: Engine
    retry_seconds: float
    turn: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @classmethod
    def connect(
        cls,
        address: Address,
        *,
        read_only: bool = False,
        create: bool = True,
        enforce_foreign_keys: bool = True,
        patience_seconds: float | None = None,
    ) -> "Database":
        """Return the database; nothing is read yet. Arguments as of `make_engine`.

        Raises:
            MoetuneError: the PostgreSQL driver is not installed.
        """
        engine = make_engine(
            address,
            read_only=read_only,
            create=create,
            enforce_foreign_keys=enforce_foreign_keys,
            patience_seconds=patience_seconds,
        )
        retry_seconds = _RETRY_BUDGET_SECONDS if patience_seconds is None else patience_seconds / 2
        return cls(
            address=address,
            read_only=read_only,
            engine=engine,
            reader=reading(engine),
            retry_seconds=retry_seconds,
        )

    def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in one transaction and commit; retry where the failure is transient.

        Raises:
            MoetuneError: it failed; nothing of it was written unless the text says otherwise.
        """
        if self.address.path is None:
            return self._run(self.engine, work)
        if not self.turn.acquire(timeout=self.retry_seconds):
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
        started = time.monotonic()
        was_lost = False
        for delay in (*_RETRY_DELAYS_SECONDS, None):
            committing = False
            try:
                with engine.begin() as connection:
                    result = work(connection)
                    committing = engine is self.engine
            except DBAPIError as error:
                if committing and faults.is_lost(error):
                    raise self._unknown_outcome() from error
                # Once a server was lost, "connection refused" means that it is restarting.
                transient = faults.is_transient(error) or was_lost
                was_lost = was_lost or faults.is_lost(error)
                spent = time.monotonic() - started
                if delay is None or not transient or spent > self.retry_seconds:
                    raise faults.translate(error, self.address) from error
                time.sleep(delay)
            except SQLAlchemyError as error:
                raise faults.translate(error, self.address) from error
            except (OverflowError, ValueError) as error:
                raise faults.unstorable(error, self.address) from error
            else:
                return result
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _unknown_outcome(self) -> StoreUnavailableError:
        return StoreUnavailableError(
            f"database {self.address.shown} was lost while a change was committed: "
            "it may or may not be stored",
            "look with `moetune profiles list` or `moetune db check` before you try again",
        )
