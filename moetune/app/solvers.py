"""Processes that solve plans under limits, and turns for equal work.

A service solves in processes, as a thread cannot be stopped, nor its memory in numpy limited.
Each executor has a single process, which solves a question at a time. The pool kills and replaces
a process whose answer is late, is too large, or has nobody waiting for it.
"""

import copyreg
import gc
import os
import queue
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, Protocol, TypeVar
from weakref import WeakValueDictionary

from moetune.domain.errors import AbandonedError, BusyError, SolveLimitError

P = ParamSpec("P")
T = TypeVar("T")
_NUM_PROCESSES = 4
"""A service's low-priority processes: several, so that small questions need not wait for big."""
_LOOK_SECONDS = 0.1


class Caller(Protocol):
    """The client that waits for an answer."""

    def watch(self) -> Callable[[], bool]:
        """Return a function that says whether the caller has hung up."""


def _nobody() -> bool:
    return False


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverLimits:
    """Limits of a question.

    Args:
        seconds: longest time to solve, and also the longest wait for a turn.
        memory_bytes: most memory beyond that of a process at its start.
        num_waiting: most questions that wait for their turn; further questions get BusyError.
    """

    seconds: float
    memory_bytes: int = 2 * 2**30
    num_waiting: int = 16


class SolverPool:
    """A pool of solver processes; threads may share it. `close` ends it within a second."""

    def __init__(self, limits: SolverLimits, *, num_processes: int = _NUM_PROCESSES) -> None:
        self.limits = limits
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["moetune.app.planner", "moetune.app.views.plan"])
        self._places = threading.BoundedSemaphore(num_processes + limits.num_waiting)
        self._free: queue.LifoQueue[ProcessPoolExecutor] = queue.LifoQueue()
        for _ in range(num_processes):
            self._free.put(self._new())
        self._lock = threading.Lock()
        self._running: set[ProcessPoolExecutor] = set()
        self._is_closed = False

    def start(self) -> None:
        """Start a process now, so that the first question need not wait for its start."""
        with suppress(AbandonedError, SolveLimitError), self._turn(_nobody) as process:
            self._answer(process, int, _nobody)

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of a function that runs in a process; arguments and result are pickled.

        Raises:
            MoetuneError: the function raised it.
            BusyError: too many questions wait already, or this question waited too long.
            SolveLimitError: the function exceeded the limit of time or memory.
            AbandonedError: the caller has hung up, or the service ends.
        """
        if not self._places.acquire(blocking=False):
            raise self._busy()
        try:
            caller = CALLER.get()
            is_gone = _nobody if caller is None else caller.watch()
            with self._turn(is_gone) as process:
                return self._answer(process, partial(function, *args, **kwargs), is_gone)
        finally:
            self._places.release()

    def close(self) -> None:
        """End all processes; callers that wait for an answer get an error."""
        with self._lock:
            self._is_closed = True
            running = tuple(self._running)
        for process in running:
            self._end(process, waits=True)
        while True:
            try:
                self._end(self._free.get_nowait(), waits=True)
            except queue.Empty:
                return

    def _new(self) -> ProcessPoolExecutor:
        """Return an executor with a single process, which starts with its first question."""
        return ProcessPoolExecutor(
            1, mp_context=self._context, initializer=prepare, initargs=(self.limits.memory_bytes,)
        )

    def _end(self, process: ProcessPoolExecutor, *, waits: bool = False) -> None:
        """Kill a process; with `waits`, wait until its executor has ended, so that Python exits."""
        with self._lock:
            self._running.discard(process)
        # Executors have no public way to kill before Python 3.14.
        for worker in tuple((process._processes or {}).values()):  # noqa: SLF001
            worker.kill()
        process.shutdown(wait=waits, cancel_futures=True)

    @contextmanager
    def _turn(self, is_gone: Callable[[], bool]) -> Iterator[ProcessPoolExecutor]:
        """Take a free process and give it back afterwards, or a new process if it was killed."""
        process = self._wait(is_gone)
        with self._lock:
            self._running.add(process)
        try:
            yield process
        finally:
            with self._lock:
                is_useful = process in self._running and not self._is_closed
            if not is_useful:
                self._end(process)
            with self._lock:
                self._running.discard(process)
            self._free.put(process if is_useful else self._new())

    def _poll(self, is_gone: Callable[[], bool]) -> Iterator[None]:
        """Yield until a question's time is over; raise AbandonedError once nobody waits."""
        deadline = time.monotonic() + self.limits.seconds
        while time.monotonic() < deadline:
            self._check(is_gone)
            yield

    def _wait(self, is_gone: Callable[[], bool]) -> ProcessPoolExecutor:
        for _ in self._poll(is_gone):
            with suppress(queue.Empty):
                return self._free.get(timeout=_LOOK_SECONDS)
        raise self._busy()

    def _answer(
        self, process: ProcessPoolExecutor, question: Callable[[], T], is_gone: Callable[[], bool]
    ) -> T:
        try:
            return self._wait_for(process.submit(answer, question), is_gone)
        except MemoryError:
            raise SolveLimitError(
                f"the answer needs more than the {self.limits.memory_bytes / 2**30:g} GiB that "
                "this service gives a question",
                "ask for fewer layers or ranks, or on the command line, which has no limit",
            ) from None
        except BrokenProcessPool:
            self._end(process)
            self._check(_nobody)  # `close` has killed it
            raise SolveLimitError(
                "the process that solved the question ended without an answer",
                "it may have run out of memory: ask for fewer layers or ranks",
            ) from None
        except (AbandonedError, SolveLimitError):
            self._end(process)
            raise

    def _wait_for(self, asked: Future[T], is_gone: Callable[[], bool]) -> T:
        for _ in self._poll(is_gone):
            if wait((asked,), _LOOK_SECONDS).done:
                return asked.result()
        raise SolveLimitError(
            f"the service has no answer within {self.limits.seconds:g} s, its limit for a question",
            "ask for fewer layers or ranks, or on the command line, which has no limit",
        )

    def _check(self, is_gone: Callable[[], bool]) -> None:
        if self._is_closed or is_gone():
            why = "the service is ending" if self._is_closed else "nobody waits for the answer"
            raise AbandonedError(f"{why}: the question is not answered", "ask again")

    def _busy(self) -> BusyError:
        return BusyError(
            f"{self.limits.num_waiting} questions or more wait to be solved already",
            "ask again in a few seconds; stored plans are answered without waiting",
        )


_NICENESS = 5
_MOST_UNCOLLECTED = 500_000
"""Objects that may stay uncollected between answers: collection during an answer took a seventh
of its time."""


def _read_only(items: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(items)


# Frozen values have read-only mappings, which pickle does not know.
copyreg.pickle(MappingProxyType, lambda proxy: (_read_only, (dict(proxy),)))


def prepare(memory_bytes: int) -> None:
    """Lower this process's priority, limit its memory, and end it with the service."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    threading.Thread(target=_end_with_the_service, daemon=True).start()
    _limit_memory(memory_bytes)
    gc.freeze()
    gc.disable()


def answer(question: Callable[[], T]) -> T:
    """Return the answer to a question."""
    if gc.get_count()[0] > _MOST_UNCOLLECTED:
        gc.collect()
    return question()


def _end_with_the_service() -> None:
    service = parent_process()
    if service is not None:
        service.join()
        os._exit(1)


def _limit_memory(num_bytes: int) -> None:
    """Limit the address space to its present size plus `num_bytes`, on systems with /proc."""
    sizes = Path("/proc/self/statm")
    if not sizes.exists():
        return
    pages = int(sizes.read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + num_bytes
    _, hardest = resource.getrlimit(resource.RLIMIT_AS)
    if hardest != resource.RLIM_INFINITY:
        most = min(most, hardest)
    resource.setrlimit(resource.RLIMIT_AS, (most, hardest))


class Turns:
    """Locks by key: of threads with equal work the first does it, and the others wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: WeakValueDictionary[str, threading.Lock] = WeakValueDictionary()

    def of(self, key: str) -> threading.Lock:
        """Return the lock of a key; it is dropped when no thread holds it or waits for it."""
        with self._lock:
            return self._locks.setdefault(key, threading.Lock())
