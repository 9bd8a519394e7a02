"""What a process of the service's solvers does before its first question, and for each."""

import copyreg
import gc
import os
import resource
import signal
import threading
from collections.abc import Callable
from multiprocessing import parent_process
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

T = TypeVar("T")
_NICENESS = 5
_MOST_UNCOLLECTED = 500_000
"""Objects that earlier answers may leave behind; collecting within an answer took a seventh of
its time."""


def _frozen(items: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(items)


# Frozen values have such mappings, which pickle does not know.
copyreg.pickle(MappingProxyType, lambda proxy: (_frozen, (dict(proxy),)))


def prepare(memory_bytes: int) -> None:
    """Limit this process's memory and priority, and let it end with the service.

    Args:
        memory_bytes: beside what the process has now.
    """
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
