"""Access rules: tokens and their files, sessions, accepted host names, the largest body."""

import hmac
import ipaddress
import os
import secrets
import shlex
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from moetune.domain.errors import InputError
from moetune.service.problems import ForbiddenError

MIN_TOKEN_CHARACTERS = 16
_MAX_FILE_BYTES = 4096
_MAKE = "make a token:  (umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > {})"


def read_token_file(path: Path) -> str:
    """Return the token in a file that only its owner can read.

    Raises:
        InputError: the file is missing, not a regular file, accessible to others, or does not
            hold a token. The message never shows its contents.
    """
    try:
        with path.open("rb") as file:
            _check_mode(path, os.fstat(file.fileno()).st_mode)
            content = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise _no_token(path, f"cannot be read: {error.strerror}") from None
    token = content.decode("ascii", errors="replace").strip()
    if len(token) < MIN_TOKEN_CHARACTERS:
        raise _no_token(path, f"has fewer than {MIN_TOKEN_CHARACTERS} characters")
    if len(content) >= _MAX_FILE_BYTES:
        raise _no_token(path, "is too long for a token")
    if not all("!" <= character <= "~" for character in token):
        raise _no_token(path, "holds spaces, or characters beyond printable ASCII")
    return token


def _check_mode(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise _no_token(path, "is not a regular file")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(
            f"token file '{path}' is open to others (mode {stat.S_IMODE(mode):04o})",
            f"chmod 600 {_quote(path)}, and make a new token if others may have read it",
        )


def _no_token(path: Path, problem: str) -> InputError:
    return InputError(f"token file '{path}' {problem}", _MAKE.format(_quote(path)))


def _quote(path: Path) -> str:
    return shlex.quote(str(path))


_LONGEST_SECONDS = 7 * 24 * 3600.0
_MOST = 1000


class Sessions:
    """The open sessions of a process; threads may share them. A restart ends all."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._opened: dict[str, float] = {}

    def open(self) -> str:
        """Open a session and return its name; if there are too many, end the oldest."""
        name = secrets.token_hex(32)
        with self._lock:
            if len(self._opened) >= _MOST:
                del self._opened[next(iter(self._opened))]
            self._opened[name] = self._now()
        return name

    def has(self, name: str) -> bool:
        """Return whether a session is open."""
        with self._lock:
            opened = self._opened.get(name)
            return opened is not None and self._now() - opened < _LONGEST_SECONDS

    def close(self, name: str) -> None:
        """End a session; ignore a name that has none."""
        with self._lock:
            self._opened.pop(name, None)


Right = Literal["none", "read", "write"]
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
DEFAULT_MAX_BODY_BYTES = 4 * 2**20
_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Rules that decide which requests are accepted.

    Without tokens everybody may read and write; `check_exposure` allows that on loopback only.
    The write token also reads. Without a read token, reading needs the write token; without a
    write token, nobody writes.

    Args:
        hosts: accepted names in the Host header, without port, in lower case.
        max_body_bytes: largest body of a request.
    """

    read_token: str | None = field(default=None, repr=False)
    write_token: str | None = field(default=None, repr=False)
    hosts: tuple[str, ...] = LOOPBACK_NAMES
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    sessions: Sessions = field(default_factory=Sessions, repr=False, compare=False)

    @property
    def is_open(self) -> bool:
        """Whether no token is needed."""
        return self.read_token is None and self.write_token is None

    def right_of(self, token: str | None) -> Right:
        """Return the right of a token's bearer, in a time that does not depend on the token."""
        if self.is_open:
            return "write"
        reads, writes = _equal(token, self.read_token), _equal(token, self.write_token)
        return "write" if writes else "read" if reads else "none"

    def right_of_cookie(self, cookie: str) -> Right:
        """Return the right of a cookie's bearer."""
        return "read" if self.sessions.has(cookie) else "none"


def check_exposure(access: Access, host: str) -> None:
    """Refuse to serve other machines without a token.

    Raises:
        InputError: there is no token, and the host is not a loopback address or `access.hosts`
            has another name, as behind a proxy that forwards requests of other machines.
    """
    if not access.is_open:
        return
    exposed = [] if is_loopback(host) else [host]
    exposed += [name for name in access.hosts if name not in {*LOOPBACK_NAMES, host.lower()}]
    if exposed:
        raise InputError(
            f"{exposed[0]} can be reached from other machines, and no token is set",
            "give --write-token-file, --read-token-file or both, or listen on 127.0.0.1",
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host; raise InputError for an unknown name."""
    try:
        addresses = _addresses(host)
    except (OSError, UnicodeError):
        raise InputError(
            f"host {host!r} has no address", "give an address of this machine, or 127.0.0.1"
        ) from None
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def names_of(host: str) -> tuple[str, ...]:
    """Return the Host names that a service listening on `host` accepts by default."""
    names = dict.fromkeys((*LOOPBACK_NAMES, host.lower()))
    if host in _WILDCARDS:
        machine = socket.gethostname()
        names |= dict.fromkeys((machine.lower(), socket.getfqdn(machine).lower()))
        with suppress(OSError):
            names |= dict.fromkeys(_addresses(machine))
    return tuple(names)


def _addresses(name: str) -> list[str]:
    return [str(info[4][0]) for info in socket.getaddrinfo(name, None)]


def _equal(given: str | None, wanted: str | None) -> bool:
    """Compare in constant time; a token that is not set equals nothing."""
    same = hmac.compare_digest((given or "").encode(), (wanted or "").encode())
    return same and bool(wanted)


def check_site(headers: Mapping[str, str], *, reads: bool) -> None:
    """Raise ForbiddenError if the browser's headers say that another site's page sends this.

    A person may follow a link of another site to a page. That site's scripts, frames and pictures
    must not make the service compute.
    """
    if headers.get("sec-fetch-site", "none") in {"none", "same-origin"}:
        return
    follows_link = (
        headers.get("sec-fetch-mode") == "navigate"
        and headers.get("sec-fetch-dest") == "document"
        and headers.get("sec-fetch-user") == "?1"
    )
    if not (reads and follows_link):
        raise ForbiddenError("a page of another site may not send this")
