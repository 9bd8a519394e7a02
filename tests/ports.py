"""A free port of this machine, for servers and ranks that tests start."""

import secrets
import socket
from contextlib import suppress

_QUIET_PORTS = range(20_000, 32_000)
"""Below 32,768, from which on Linux gives ports to connections that name none."""


def free_port() -> int:
    """Return a port that no outgoing connection takes."""
    while True:
        port = secrets.choice(_QUIET_PORTS)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
