"""One open database: transactions that are retried, and end in one clear error."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from moetune.domain.errors import MoetuneError
from moetune.store import faults
from moetune.store.address import Address
from moetune.store.engine import make_engine, reading, without_transaction

T = TypeVar("T")
_RETRY_DELAYS_SECONDS = (0.1, 0.5, 2.0)
# SQLite has already waited its busy timeout when it gives up: then there is no second wait.
_RETRY_BUDGET_SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """An address with its engine. Open one in each process: it does not survive a fork."""

    address: Address
    engine: Engine

    @classmethod
    def connect(
        cls, address: Address, *, read_only: bool = False, enforce_foreign_keys: bool = True
    ) -> "Database":
        """Return the database; nothing is read yet.

        Raises:
            MoetuneError: the PostgreSQL driver is not installed.
        """
        engine = make_engine(
            address, read_only=read_only, enforce_foreign_keys=enforce_foreign_keys
        )
        return cls(address=address, engine=engine)

    def write(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in one transaction, again where it failed by chance, and commit.

        Raises:
            MoetuneError: it failed; nothing of it was written unless the text says otherwise.
        """
        return self._run(self.engine, work)

    def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work`, which only reads, in one transaction: it sees one state of the rows.

        Raises:
            MoetuneError: it failed.
        """
        return self._run(reading(self.engine), work)

    def outside(self, work: Callable[[Connection], T]) -> T:
        """Run `work`, pragmas of SQLite, outside of a transaction.

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
                if delay is None or not transient or spent > _RETRY_BUDGET_SECONDS:
                    raise faults.translate(error, self.address) from error
                time.sleep(delay)
            except SQLAlchemyError as error:
                raise faults.translate(error, self.address) from error
            except (OverflowError, ValueError) as error:
                raise faults.unstorable(error, self.address) from error
            else:
                return result
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _unknown_outcome(self) -> MoetuneError:
        return MoetuneError(
            f"database {self.address.shown} was lost while a change was committed: "
            "it may or may not be stored",
            "look with `moetune profiles list` or `moetune db check` before you try again",
        )
