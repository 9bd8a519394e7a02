"""One process that solves a question at a time, under a memory limit."""

import copyreg
import gc
import os
import resource
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from moetune.domain.errors import MoetuneError, SolveLimitError

T = TypeVar("T")
_NICENESS = 5
_IDLE_SECONDS, _MOST_UNCOLLECTED = 0.2, 16
"""Without a question for that long, or after so many, what answers left behind is collected: a
front is asked for as soon as its plan is there."""


def _frozen(items: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(items)


# Frozen values have such mappings, which pickle does not know.
copyreg.pickle(MappingProxyType, lambda proxy: (_frozen, (dict(proxy),)))


class SolverProcess:
    """A process and the pipe to it. It is started when it is first needed."""

    def __init__(self, context: ForkServerContext, memory_bytes: int) -> None:
        self._context = context
        self._memory_bytes = memory_bytes
        self._pipe: Connection | None = None
        self._process: BaseProcess | None = None
        self._is_killed = False

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked again."""
        return self._process is not None and not self._is_killed and self._process.is_alive()

    def start(self) -> None:
        """Start it where it does not run."""
        if self._process is not None:
            return
        self._pipe, other = self._context.Pipe()
        process = self._context.Process(
            target=_solve_questions, args=(other, self._memory_bytes), daemon=True
        )
        process.start()
        other.close()
        self._process = process
        if self._is_killed:
            process.kill()

    def ask(self, question: Callable[[], object]) -> None:
        """Send a question; an answer of an earlier one must have been taken.

        Raises:
            MoetuneError: the process has ended.
        """
        try:
            self._open.send(question)
        except OSError as error:
            raise self._ended() from error

    def has_answered(self, timeout_seconds: float) -> bool:
        """Return whether there is an answer, or the process has ended, within that time."""
        return self._open.poll(timeout_seconds)

    def answer(self) -> Any:  # noqa: ANN401 - of any question
        """Return the answer, or raise the error of the question.

        Raises:
            MoetuneError: of the question, or the process has ended.
        """
        try:
            is_right, found = self._open.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if is_right:
            return found
        raise found

    def kill(self) -> None:
        """End the process at once."""
        self._is_killed = True
        if self._process is not None:
            self._process.kill()

    @property
    def _open(self) -> Connection:
        if self._pipe is None:
            raise MoetuneError("the process that solves was not started")
        return self._pipe

    def _ended(self) -> MoetuneError:
        self.kill()
        return SolveLimitError(
            "the process that solved the question ended without an answer",
            "it may have run out of memory: ask for fewer layers or ranks",
        )


def _solve_questions(pipe: Connection, memory_bytes: int) -> None:
    """Answer questions until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(_NICENESS)
    _limit_memory(memory_bytes)
    gc.freeze()
    gc.disable()  # collections within an answer took a seventh of its time
    uncollected = 0
    while True:
        try:
            question = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[bool, object] = (True, question())
        except MoetuneError as error:
            answer = (False, error)
        except MemoryError:
            answer = (False, _out_of_memory(memory_bytes))
        except Exception as error:  # noqa: BLE001 - it is raised in the process that asked
            error.add_note("".join(traceback.format_exception(error)))
            answer = (False, error)
        pipe.send(answer)
        uncollected += 1
        if uncollected == _MOST_UNCOLLECTED or not pipe.poll(_IDLE_SECONDS):
            gc.collect()
            uncollected = 0


def _out_of_memory(memory_bytes: int) -> SolveLimitError:
    return SolveLimitError(
        f"the answer needs more than the {memory_bytes / 2**30:g} GiB that this service gives a "
        "question",
        "ask for fewer layers or ranks, or on the command line, which has no limit",
    )


def _limit_memory(num_bytes: int) -> None:
    """Limit the address space to what it is now and so much more, where the system says it."""
    sizes = Path("/proc/self/statm")
    if not sizes.exists():
        return
    pages = int(sizes.read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + num_bytes
    _, hardest = resource.getrlimit(resource.RLIMIT_AS)
    if hardest != resource.RLIM_INFINITY:
        most = min(most, hardest)
    resource.setrlimit(resource.RLIMIT_AS, (most, hardest))
