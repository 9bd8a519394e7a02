"""Who may ask what: the tokens, the names the service answers to, the size of a body."""

import hmac
import ipaddress
import socket
from dataclasses import dataclass, field
from typing import Literal

from moetune.domain.errors import InputError

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
