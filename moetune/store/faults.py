"""What a driver's error means to the user. No error of SQLAlchemy or a driver gets past this."""

from types import MappingProxyType

from sqlalchemy.exc import DBAPIError, SQLAlchemyError, StatementError

from moetune.domain.errors import InputError, MoetuneError
from moetune.store.address import Address

_RETRIED_SQLITE = ("SQLITE_BUSY", "SQLITE_LOCKED")
# Serialization failure, deadlock, lock not available, lost connections, starting or stopping.
_RETRIED_SQLSTATES = ("40001", "40P01", "55P03", "08", "57P")
_LOST_SQLSTATES = ("08", "57P")

_Meaning = tuple[type[MoetuneError], str, str]
_SQLITE = MappingProxyType[str, _Meaning](
    {
        "SQLITE_NOTADB": (InputError, "is no database", "name another file with --db"),
        "SQLITE_CORRUPT": (
            InputError,
            "is damaged",
            "restore a backup (`moetune db backup` makes one), or move the file away",
        ),
        "SQLITE_CANTOPEN": (
            InputError,
            "cannot be opened",
            "check that the folder exists and that you may read and write it",
        ),
        "SQLITE_PERM": (MoetuneError, "may not be used", "check the file's permissions"),
        "SQLITE_READONLY": (
            MoetuneError,
            "cannot be written: it is read-only",
            "check the permissions of the file and of its folder, or name another with --db",
        ),
        "SQLITE_FULL": (
            MoetuneError,
            "cannot grow: the disk is full; nothing was written",
            "free some space and try again",
        ),
        "SQLITE_IOERR": (
            MoetuneError,
            "cannot be read or written: the disk refused; nothing was written",
            "check free space, quota and the health of the disk, then try again",
        ),
        "SQLITE_BUSY": (
            MoetuneError,
            "stayed locked by another process",
            "end the process that holds it, or try again",
        ),
        "SQLITE_LOCKED": (MoetuneError, "stayed locked by another process", "try again"),
        "SQLITE_CONSTRAINT_FOREIGNKEY": (
            InputError,
            "lacks the row that this one belongs to: it was removed meanwhile",
            "start again",
        ),
        "SQLITE_TOOBIG": (InputError, "cannot hold a row of this size", "store fewer samples"),
    }
)
_SQLSTATES = MappingProxyType[str, _Meaning](
    {
        "23503": _SQLITE["SQLITE_CONSTRAINT_FOREIGNKEY"],
        "22": (InputError, "cannot hold this value", "check the names and sizes given"),
        "25006": (MoetuneError, "is read-only", "connect to the primary server"),
        "28": (MoetuneError, "refuses this user or password", "check the user and the password"),
        "3D000": (InputError, "does not exist", "create it with `createdb`, or name another"),
        "40": (MoetuneError, "had too many conflicting writers", "try again"),
        "42501": (
            MoetuneError,
            "does not allow this user to do that",
            "ask for the right to create and write tables in it",
        ),
        "53100": (MoetuneError, "has no space left; nothing was written", "free some space"),
        "53300": (MoetuneError, "has too many connections", "try again later"),
        "55P03": (MoetuneError, "stayed locked by another process", "try again"),
        "57P": (MoetuneError, "is starting or stopping", "try again when the server runs"),
    }
)
_CONNECTING: tuple[tuple[str, _Meaning], ...] = (
    ("password authentication failed", _SQLSTATES["28"]),
    ("no password supplied", _SQLSTATES["28"]),
    ("does not exist", _SQLSTATES["3D000"]),
)
_UNREACHABLE: _Meaning = (
    MoetuneError,
    "cannot be reached",
    "check that the server runs, and the host, the port and the network",
)


def is_transient(error: DBAPIError) -> bool:
    """Return whether the same transaction may succeed when it is run again."""
    return (
        error.connection_invalidated
        or _sqlite_name(error).startswith(_RETRIED_SQLITE)
        or _sqlstate(error).startswith(_RETRIED_SQLSTATES)
    )


def is_lost(error: DBAPIError) -> bool:
    """Return whether the connection to a server broke."""
    return error.connection_invalidated or _sqlstate(error).startswith(_LOST_SQLSTATES)


def translate(error: SQLAlchemyError, address: Address) -> MoetuneError:
    """Return what the error means for the database at `address`, without secrets."""
    if isinstance(error, DBAPIError):
        detail = address.scrub(" ".join(str(error.orig).split()))
        kind, what, hint = _meaning(error, is_server=address.path is None)
        return kind(f"database {address.shown} {what} ({detail})", hint)
    if isinstance(error, StatementError) and isinstance(error.orig, ValueError):
        return unstorable(error.orig, address)
    return MoetuneError(
        f"database {address.shown} failed: {address.scrub(str(error))}",
        "run `moetune db check`",
    )


def unstorable(error: Exception, address: Address) -> InputError:
    """Return the error for a value that no column can hold: NaN, half a character, 2^70."""
    return InputError(
        f"database {address.shown} cannot hold this value ({error})",
        "check the names and numbers given",
    )


def _meaning(error: DBAPIError, *, is_server: bool) -> _Meaning:
    name, state = _sqlite_name(error), _sqlstate(error)
    for prefix, meaning in _SQLITE.items():
        if name.startswith(prefix):
            return meaning
    for prefix, meaning in _SQLSTATES.items():
        if state.startswith(prefix):
            return meaning
    if is_server and not state:
        # libpq gives no SQLSTATE while it connects: its text is all there is.
        text = str(error.orig)
        return next((meaning for part, meaning in _CONNECTING if part in text), _UNREACHABLE)
    return MoetuneError, "failed", "run `moetune db check`"


def _sqlite_name(error: DBAPIError) -> str:
    return str(getattr(error.orig, "sqlite_errorname", None) or "")


def _sqlstate(error: DBAPIError) -> str:
    return str(getattr(error.orig, "sqlstate", None) or "")
