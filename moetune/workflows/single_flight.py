"""Deduplication of concurrent work: equal calls of several threads run once."""

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from moetune.domain.errors import MoetuneError

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Calls in progress, by key, as in Go's `singleflight`; results are not stored.

    The work of a key must not run the same key: it would wait for itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[Hashable, Future[T]] = {}

    def run(self, key: Hashable, work: Callable[[], T]) -> T:
        """Return the work's result, of this call or of the one in progress; raise its error.

        Raises:
            MoetuneError: the call in progress failed with another kind of error.
        """
        with self._lock:
            leader = self._under_way.get(key)
            mine: Future[T] = Future()
            if leader is None:
                self._under_way[key] = mine
        if leader is not None:
            return _result_of(leader)
        try:
            result = work()
        except BaseException as error:
            mine.set_exception(error)
            raise
        else:
            mine.set_result(result)
            return result
        finally:
            with self._lock:
                del self._under_way[key]


def _result_of(leader: Future[T]) -> T:
    error = leader.exception()
    if error is None:
        return leader.result()
    if isinstance(error, MoetuneError):
        # A copy: threads that raise the same object overwrite each other's traceback.
        raise type(error)(*error.args) from error
    raise MoetuneError(
        f"an equal request failed: {type(error).__name__}: {error}", "try again"
    ) from error
