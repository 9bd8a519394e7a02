"""Database addresses: a user's text to a checked address that never shows its password."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from moetune.domain.errors import InputError

_FORMS = "give a file, sqlite:///FILE, or postgresql+psycopg://USER@HOST/DATABASE"
_SQLITE_DRIVERS = ("sqlite", "sqlite+pysqlite")
_POSTGRESQL_DRIVERS = ("postgresql", "postgresql+psycopg")
_SECRET_OPTIONS = ("password", "sslpassword")
_SHOWN_OPTIONS = ("host", "port", "service")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A database and how to reach it.

    Args:
        shown: the address without passwords, for messages.
        path: the absolute file of a SQLite database, None for PostgreSQL.
        url: the URL that SQLAlchemy connects to.
        secrets: the texts that no message may contain.
    """

    shown: str
    path: Path | None
    url: URL = field(repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def scrub(self, text: str) -> str:
        """Return a driver's text without the secrets."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def parse_address(text: str) -> Address:
    """Return the address of a file, or a URL of SQLite or PostgreSQL; or raise InputError."""
    if not text.strip() or "\0" in text:
        raise InputError(f"{text!r} is no database", _FORMS)
    if "://" not in text:
        if re.match(r"(sqlite|postgresql)[+\w]*:", text):
            raise InputError(f"{_hide_password(text)!r} is no database URL", _FORMS)
        return _file_address(text)
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise InputError(f"{_hide_password(text)!r} is no database URL", _FORMS) from None
    if url.drivername in _SQLITE_DRIVERS:
        return _sqlite_address(url)
    if url.drivername in _POSTGRESQL_DRIVERS:
        return _postgresql_address(url)
    raise InputError(f"databases of the kind {url.drivername!r} are not supported", _FORMS)


def database_file(text: str) -> Path | None:
    """Return a SQLite database's absolute file, else None; raise as `parse_address` does."""
    return parse_address(text).path


def _hide_password(text: str) -> str:
    return re.sub(r"(?<=:)[^:@]*(?=@)|(?<=password=)[^&]*", "***", text)


def _file_address(name: str) -> Address:
    try:
        path = Path(name).expanduser().absolute()
    except RuntimeError:
        raise InputError(f"{name!r} has an unknown home directory", _FORMS) from None
    return Address(shown=str(path), path=path, url=URL.create("sqlite"))


def _sqlite_address(url: URL) -> Address:
    if url.host is not None:
        raise InputError(
            f"sqlite://{url.host} lacks a slash",
            f"a file follows three slashes, an absolute one four: sqlite:///{url.host}",
        )
    if not url.database or url.database == ":memory:":
        raise InputError("a database in memory would be lost at the end", _FORMS)
    if url.query:
        raise InputError(f"sqlite:///{url.database} takes no options after '?'", _FORMS)
    return _file_address(url.database)


def _postgresql_address(url: URL) -> Address:
    secrets = tuple(secret for secret in _secrets(url) if secret)
    public = URL.create(
        "postgresql+psycopg",
        username=url.username,
        host=url.host,
        port=url.port,
        database=url.database,
        query={key: value for key, value in url.query.items() if key in _SHOWN_OPTIONS},
    )
    url = url.set(drivername="postgresql+psycopg")
    return Address(shown=public.render_as_string(), path=None, url=url, secrets=secrets)


def _secrets(url: URL) -> Iterator[str]:
    if url.password is not None:
        yield str(url.password)
    for key in _SECRET_OPTIONS:
        value = url.query.get(key, "")
        yield from (value,) if isinstance(value, str) else value
