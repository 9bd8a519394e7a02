"""A free port of this machine for ranks to meet at."""

import secrets
import socket
from contextlib import suppress

from moetune.domain.errors import CollectiveError

_QUIET_PORTS = range(20_000, 32_000)
"""Below 32,768, from which on Linux gives ports to connections that name none."""


def free_port() -> int:
    """Return a port that no outgoing connection takes before rank 0 listens.

    Raises:
        CollectiveError: none is free.
    """
    for _ in _QUIET_PORTS:
        port = secrets.choice(_QUIET_PORTS)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    first, last = _QUIET_PORTS[0], _QUIET_PORTS[-1]
    raise CollectiveError(f"no port from {first} to {last} is free")
