"""Translation of errors of SQLAlchemy and its drivers into moetune's errors."""

from sqlalchemy.exc import DataError, DBAPIError, SQLAlchemyError, StatementError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from moetune.domain.errors import BadStoreError, InputError, MoetuneError, StoreUnavailableError
from moetune.store.address import Address

_AGAIN = ("40001", "40P01", "08", "57P")
"""SQLSTATEs to try again after: conflict, deadlock, lost connection, starting or stopping."""
_LOST = ("08", "57P")
_AWAY, _BAD = StoreUnavailableError, BadStoreError
_Meaning = tuple[type[MoetuneError], str, str]
_MEANINGS: tuple[tuple[tuple[str, ...], _Meaning], ...] = (
    (("SQLITE_NOTADB",), (_BAD, "is no database", "name another file with --db")),
    (("SQLITE_CORRUPT",), (
        _BAD, "is damaged",
        "restore a backup, or move the file away",
    )),
    (("SQLITE_CANTOPEN",), (
        _BAD, "cannot be opened",
        "check that the folder exists and that you may read and write it",
    )),
    (("SQLITE_PERM",), (_AWAY, "may not be used", "check the file's permissions")),
    (("SQLITE_READONLY",), (
        _AWAY, "cannot be written: it is read-only",
        "check the permissions of the file and of its folder, or name another with --db",
    )),
    (("SQLITE_FULL",), (
        _AWAY, "cannot grow: the disk is full; nothing was written",
        "free some space and try again",
    )),
    (("SQLITE_IOERR",), (
        _AWAY, "cannot be read or written: the disk refused; nothing was written",
        "check free space, quota and the health of the disk, then try again",
    )),
    (("SQLITE_BUSY", "SQLITE_LOCKED", "55P03"), (
        _AWAY, "stayed locked by another process", "end the process that holds it, or try again",
    )),
    (("SQLITE_CONSTRAINT_FOREIGNKEY", "23503"), (
        InputError, "lacks the row that this row belongs to: it was removed meanwhile",
        "start again",
    )),
    (("SQLITE_TOOBIG",), (InputError, "cannot hold a row of this size", "store fewer samples")),
    (("22",), (InputError, "cannot hold this value", "check the names and sizes given")),
    (("25006",), (_AWAY, "is read-only", "connect to the primary server")),
    (("28", "password authentication failed", "no password supplied"), (
        _AWAY, "refuses this user or password", "check the user and the password",
    )),
    (("3D000", "does not exist"), (
        _BAD, "does not exist", "create it with `createdb`, or name another",
    )),
    (("40",), (_AWAY, "had too many conflicting writers", "try again")),
    (("42501",), (
        _AWAY, "does not allow this user to do that",
        "ask for the right to create and write tables in it",
    )),
    (("42P01", "42703", "no such table", "no such column"), (
        # The file was replaced, or the schema changed, while it was open.
        _BAD, "has other tables than this moetune's", "see `moetune doctor`",
    )),
    (("53100",), (_AWAY, "has no space left; nothing was written", "free some space")),
    (("53300",), (_AWAY, "has too many connections", "try again later")),
    (("57P",), (_AWAY, "is starting or stopping", "try again when the server runs")),
)  # fmt: skip
"""Meanings of SQLite's codes, of beginnings of SQLSTATEs, and of words of drivers."""


def is_transient(error: DBAPIError) -> bool:
    """Return whether the same transaction may succeed when it is run again at once."""
    return error.connection_invalidated or _code(error).startswith(_AGAIN)


def is_lost(error: DBAPIError) -> bool:
    """Return whether the connection to a server broke."""
    return error.connection_invalidated or _code(error).startswith(_LOST)


def translate(error: SQLAlchemyError, address: Address) -> MoetuneError:
    """Return moetune's error for an error of the database at `address`, without secrets."""
    if isinstance(error, DBAPIError):
        detail = address.scrub(" ".join(str(error.orig).split()))
        kind, what, hint = _meaning(error, is_server=address.path is None)
        return kind(f"database {address.shown} {what} ({detail})", hint)
    if isinstance(error, StatementError) and isinstance(error.orig, ValueError):
        return unstorable(error.orig, address)
    if isinstance(error, PoolTimeoutError):
        return _AWAY(
            f"database {address.shown} is busy: every connection of this process is in use",
            "try again",
        )
    return StoreUnavailableError(
        f"database {address.shown} failed: {address.scrub(str(error))}", "run `moetune db check`"
    )


def unstorable(error: Exception, address: Address) -> InputError:
    """Return the error for a value that no column can hold: NaN, a lone surrogate, 2^70."""
    return InputError(
        f"database {address.shown} cannot hold this value ({error})",
        "check the names and numbers given",
    )


def _meaning(error: DBAPIError, *, is_server: bool) -> _Meaning:
    code, text = _code(error), str(error.orig)
    if isinstance(error, DataError) and not code:
        # The driver refused it before it was sent: a NUL in a text, for PostgreSQL.
        code = "22"
    is_worded = not code or code == "SQLITE_ERROR"  # libpq gives no code while it connects
    for signs, meaning in _MEANINGS:
        words = [sign for sign in signs if " " in sign]
        if code.startswith(signs) or (is_worded and any(sign in text for sign in words)):
            return meaning
    if is_server and not code:
        where = "check that the server runs, and the host, the port and the network"
        return _AWAY, "cannot be reached", where
    return StoreUnavailableError, "failed", "run `moetune db check`"


def _code(error: DBAPIError) -> str:
    """Return SQLite's name of the error, or the server's SQLSTATE; "" if it has neither."""
    names = (getattr(error.orig, name, None) for name in ("sqlite_errorname", "sqlstate"))
    return str(next(filter(None, names), ""))
