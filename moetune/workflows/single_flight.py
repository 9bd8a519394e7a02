"""Work that several threads want at once is done once, and everybody gets the result."""

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from moetune.domain.errors import MoetuneError

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Work under way, by a key: who wants it meanwhile waits for it, in this process.

    Nothing is kept afterwards. A key must not be wanted by the work that it stands for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[Hashable, Future[T]] = {}

    def run(self, key: Hashable, work: Callable[[], T]) -> T:
        """Return what the work returns; its error is raised to everybody who waits.

        Raises:
            MoetuneError: the thread that worked was interrupted.
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
        # Of its own: threads that raise one error at once spoil each other's tracebacks.
        raise type(error)(*error.args) from error
    raise MoetuneError(
        f"the work failed that was waited for: {type(error).__name__}: {error}", "ask again"
    ) from error
