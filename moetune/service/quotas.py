"""Limits of what a client may add in an hour, and of the size of the store.

A client is an address, of IPv6 the network of 64 bits; all clients behind a proxy are one. What
was not used in an hour does not add up.
"""

import ipaddress
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

from moetune.domain.errors import InputError
from moetune.domain.units import format_bytes
from moetune.service.problems import QuotaError, StoreFullError

Kind = Literal["plans", "observations", "profiles"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_HOUR_SECONDS = 3600.0
_MOST_CLIENTS = 10_000
"""So many clients are remembered; who has added nothing for longest is forgotten first."""
_SIZE_SECONDS = 5.0
"""The measured size of the store is used for so long."""
_IPV6_PREFIX = 64
_ROUNDING = 1e-6
"""Share of a row: far more than the rounding of an hour's many small parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaLimits:
    """Limits of what is added.

    Args:
        plans, observations, profiles: that one client may add in an hour.
        store_bytes: of the rows from which on nothing is added; what is stored is still read.

    Raises:
        InputError: one is below 1.
    """

    plans: int = 1_000
    observations: int = 200_000
    profiles: int = 100
    store_bytes: int = 10 * 2**30

    def __post_init__(self) -> None:
        for name in (*KINDS, "store_bytes"):
            if getattr(self, name) < 1:
                raise InputError(f"the limit of {name} must be at least 1")

    def of(self, kind: Kind) -> int:
        """Return the limit of a kind of rows."""
        return int(getattr(self, kind))


@dataclass(slots=True, kw_only=True)
class Quotas:
    """Counts what clients add; threads may share it.

    Args:
        limits: of each client, and of the store.
        store_bytes: returns the bytes that the store takes now.
        now: seconds of a clock that never goes back.

    Of each client and kind it has the time at which the client may add a whole hour's rows again.
    """

    limits: QuotaLimits
    store_bytes: Callable[[], int]
    now: Callable[[], float] = time.monotonic
    _full_at: OrderedDict[tuple[str, Kind], float] = field(default_factory=OrderedDict)
    _size: tuple[float, int] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, client: str, kind: Kind, count: int = 1) -> None:
        """Count what a client is about to add.

        Raises:
            QuotaError: it has added as much as it may; nothing is counted.
            StoreFullError: the store has reached its size.
        """
        if (size := self.size_bytes()) >= self.limits.store_bytes:
            raise StoreFullError(
                f"the store has {format_bytes(size)} of at most "
                f"{format_bytes(self.limits.store_bytes)}: nothing is added to it",
                "remove old rows on the server with `moetune db prune --older-than 90d`",
            )
        with self._lock:
            self._take(_network(client), kind, count)

    def size_bytes(self) -> int:
        """Return the size of the store, a few seconds old at most."""
        measured = self._size
        if measured is None or self.now() - measured[0] >= _SIZE_SECONDS:
            measured = self._size = self.now(), self.store_bytes()
        return measured[1]

    def _take(self, client: str, kind: Kind, count: int) -> None:
        now, most = self.now(), self.limits.of(kind)
        rate = most / _HOUR_SECONDS
        full_at = max(now, self._full_at.pop((client, kind), now))
        left = most - rate * (full_at - now)
        is_refused = count > left + _ROUNDING
        self._full_at[client, kind] = full_at if is_refused else full_at + count / rate
        if len(self._full_at) > _MOST_CLIENTS:
            self._full_at.popitem(last=False)
        if is_refused:
            raise QuotaError(
                f"this client has added the {most:,} {kind} of an hour, or would with these",
                "send fewer, try again later, or ask for a higher limit of `moetune serve`",
                retry_after_seconds=math.ceil((min(count, most) - left) / rate),
            )


def _network(client: str) -> str:
    """Return the address, or of IPv6 the network, which one machine has whole."""
    try:
        address = ipaddress.ip_address(client.partition("%")[0])
    except ValueError:
        return client
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(ipaddress.IPv6Network((address, _IPV6_PREFIX), strict=False))
