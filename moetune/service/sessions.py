"""Sessions of browsers: random names that stand for a token, until they are closed or too old."""

import secrets
import threading
import time
from collections.abc import Callable

_LONGEST_SECONDS = 7 * 24 * 3600.0
_MOST = 1000


class Sessions:
    """Open sessions of one process; threads may share it. A restart ends them all."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._opened: dict[str, float] = {}

    def open(self) -> str:
        """Return the name of a new session; with too many the oldest one ends."""
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
        """End a session; an unknown one is none."""
        with self._lock:
            self._opened.pop(name, None)
