"""Ask a service over many kept connections at once, and time every answer."""

import asyncio
import re
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Times of single requests while a load ran, and how many came in a second."""

    seconds: Sequence[float]
    per_second: float

    def quantile(self, share: float) -> float:
        """Return the time that `share` of the requests kept to."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Connection:
    """One kept HTTP/1.1 connection that sends prepared requests and checks the answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, url: str) -> "Connection":
        """Connect to the service."""
        place = urlsplit(url)
        return cls(*await asyncio.open_connection(place.hostname, place.port, limit=2**24))

    async def ask(self, request: bytes) -> bytes:
        """Send a request and return the body of its answer, which must be 200."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None  # noqa: S101 - every answer here has one
        body = await self._reader.readexactly(int(length[1]))
        if not head.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"{head.decode()}{body.decode()[:500]}")
        return body

    async def close(self) -> None:
        """Close it."""
        self._writer.close()
        await self._writer.wait_closed()


async def load(
    url: str,
    requests: Sequence[bytes],
    *,
    num_connections: int,
    num_seconds: float,
    offered_per_second: int | None = None,
) -> Latencies:
    """Ask over all connections at once.

    Args:
        offered_per_second: requests that are due in a second, whatever became of those before;
            a late one's time counts from when it was due. None for as many as are answered.
    """
    connections = [await Connection.open(url) for _ in range(num_connections)]
    begin = time.perf_counter()
    end = begin + num_seconds
    seconds: list[float] = []

    async def ask(index: int, connection: Connection) -> None:
        turn = index
        while (now := time.perf_counter()) < end:
            due = now
            if offered_per_second is not None:
                due = begin + turn / offered_per_second
                await asyncio.sleep(max(0.0, due - now))
            # Plans are asked for in an order without a pattern that a cache could profit from.
            await connection.ask(requests[turn * 7919 % len(requests)])
            seconds.append(time.perf_counter() - due)
            turn += num_connections

    await together([ask(index, one) for index, one in enumerate(connections)])
    spent = time.perf_counter() - begin
    await together([one.close() for one in connections])
    return Latencies(seconds=seconds, per_second=len(seconds) / spent)


def get(path: str) -> bytes:
    """Return a request."""
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: */*\r\n\r\n".encode()


async def together(work: Sequence[Awaitable[None]]) -> None:
    """Wait for all of it."""
    await asyncio.gather(*work)
