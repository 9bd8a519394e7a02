"""The port at which ranks meet."""

import socket
from pathlib import Path

import pytest

from moetune.domain.errors import CollectiveError
from moetune.workflows.ports import free_port


def test_a_port_is_free_and_no_outgoing_connection_takes_it() -> None:
    ports = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    first_outgoing = int(ports.split()[0])
    for _ in range(20):
        port = free_port()
        assert 1024 < port < first_outgoing
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_no_free_port_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(98, "Address already in use")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(CollectiveError, match="no port from 20000 to 31999 is free"):
        free_port()
