"""Access: the tokens and their files, the names the service answers to, the size of a body."""

import hmac
import ipaddress
import os
import socket
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from moetune.domain.errors import InputError

MIN_TOKEN_CHARACTERS = 16
_MAX_FILE_BYTES = 4096
_MAKE_ONE = "make one:  (umask 077; python -c 'import secrets; print(secrets.token_hex(32))' > {})"


def read_token_file(path: Path) -> str:
    """Return the token in a file that only its owner can read.

    Raises:
        InputError: the file is missing, no file, open to others, or holds no token. The text
            names the file and never shows what is in it.
    """
    try:
        with path.open("rb") as file:
            _check_mode(path, os.fstat(file.fileno()))
            content = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise InputError(
            f"token file {path} cannot be read: {error.strerror}", _MAKE_ONE.format(path)
        ) from None
    return _checked(path, content)


def check_secret_file(path: Path, what: str) -> None:
    """Refuse a secret's file that is missing or that everybody can read.

    Raises:
        InputError: so it is.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise InputError(f"{what} {path} cannot be read: {error.strerror}") from None
    if mode & stat.S_IROTH:
        raise InputError(f"{what} {path} can be read by everybody", f"chmod o-r {path}")


def _check_mode(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise InputError(f"token file {path} is no file", _MAKE_ONE.format(path))
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InputError(
            f"token file {path} is open to others (mode {stat.S_IMODE(found.st_mode):04o})",
            f"chmod 600 {path}, and make a new token if others may have read it",
        )


def _checked(path: Path, content: bytes) -> str:
    token = content.decode("ascii", errors="replace").strip()
    problem = ""
    if len(token) < MIN_TOKEN_CHARACTERS:
        problem = f"has fewer than {MIN_TOKEN_CHARACTERS} characters"
    elif len(content) >= _MAX_FILE_BYTES:
        problem = "is too long for a token"
    elif not all("!" <= character <= "~" for character in token):
        problem = "holds more than one word of plain characters"
    if problem:
        raise InputError(f"token file {path} {problem}", _MAKE_ONE.format(path))
    return token


Right = Literal["none", "read", "write"]
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
DEFAULT_MAX_BODY_BYTES = 4 * 2**20
_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What a request needs to be let in.

    Without any token everybody may read and write: `check_exposure` allows that on loopback
    only. With one or both, the write token also reads; where there is no read token, reading
    takes the write token, and where there is no write token, nobody writes.

    Args:
        hosts: names of the Host header that are answered, without port, in lower case.
        max_body_bytes: longest body of a request.
    """

    read_token: str | None = field(default=None, repr=False)
    write_token: str | None = field(default=None, repr=False)
    hosts: tuple[str, ...] = LOOPBACK_NAMES
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES

    @property
    def is_open(self) -> bool:
        """Whether no token is asked for."""
        return self.read_token is None and self.write_token is None

    def right_of(self, token: str | None) -> Right:
        """Return what the bearer of a token may do, in a time that says nothing of the tokens."""
        if self.is_open:
            return "write"
        reads = _equal(token, self.read_token)
        writes = _equal(token, self.write_token)
        return "write" if writes else "read" if reads else "none"

    @property
    def cookie(self) -> str:
        """What a browser that has shown a token keeps instead of it; it reads, no more."""
        key = self.read_token or self.write_token or ""
        return hmac.new(key.encode(), b"moetune page", "sha256").hexdigest()

    def right_of_cookie(self, cookie: str) -> Right:
        """Return what the bearer of a cookie may do."""
        return "read" if _equal(cookie, self.cookie) else "none"


def check_exposure(access: Access, host: str) -> None:
    """Refuse to be reached from other machines without a token.

    Args:
        host: name or address that the service listens on.

    Raises:
        InputError: it is no loopback address, or a name among `access.hosts` is another's:
            then a proxy brings requests from elsewhere.
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
    """Return whether only this machine reaches the name or address.

    Raises:
        InputError: the name has no address.
    """
    try:
        found = socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        raise InputError(
            f"host {host!r} has no address", "give an address of this machine, or 127.0.0.1"
        ) from None
    return all(ipaddress.ip_address(str(one[4][0])).is_loopback for one in found)


def names_of(host: str) -> tuple[str, ...]:
    """Return the names under which a service that listens on `host` is asked for by default."""
    names = dict.fromkeys((*LOOPBACK_NAMES, host.lower()))
    if host in _WILDCARDS:
        names |= dict.fromkeys(_own_names())
    return tuple(names)


def _own_names() -> tuple[str, ...]:
    name = socket.gethostname()
    try:
        addresses = [str(one[4][0]) for one in socket.getaddrinfo(name, None)]
    except OSError:
        addresses = []
    return (name.lower(), socket.getfqdn(name).lower(), *addresses)


def _equal(given: str | None, wanted: str | None) -> bool:
    """Compare in constant time; a token that is not set equals nothing."""
    same = hmac.compare_digest((given or "").encode(), (wanted or "").encode())
    return same and bool(wanted)
