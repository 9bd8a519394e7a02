"""A clean end for a process that used gloo: wait at exit until gloo's threads are idle.

`process_group` registers this with the first communicator. A collective of gloo is over for its
caller as soon as the data is there; the thread that ran it frees its tensors a moment later, and
needs the interpreter's lock (GIL) for that. If the script has ended meanwhile, the closing
interpreter ends the thread in the middle of a C++ destructor, and the process aborts: "terminate
called without an active exception" (pytorch/pytorch#190489).
"""

import atexit
import functools
import time
from pathlib import Path

_WORKER = "pt_gloo_runloop"
_THREADS = Path("/proc/self/task")
_PAUSE_SECONDS = 0.01
_PATIENCE_SECONDS = 10.0
_FIXED_SECONDS = 0.2


@functools.cache
def exit_cleanly() -> None:
    """Register `wait_for_workers` to run when the interpreter closes; once a process.

    It involves no other rank. Handlers of `atexit` that are registered later run before it and may
    use collectives; exit code, output and all other handlers are unchanged.
    """
    atexit.register(wait_for_workers)


def wait_for_workers() -> None:
    """Wait, without the interpreter's lock, until gloo's threads have slept through a pause.

    A thread that still frees tensors is runnable, or wakes as soon as it gets the lock, which is
    free during the pause. Only a thread with nothing to do, or in an exchange that no other rank
    has joined, sleeps on. Without Linux's /proc the wait has a fixed length.
    """
    if not _THREADS.is_dir():
        time.sleep(_FIXED_SECONDS)
        return
    deadline = time.monotonic() + _PATIENCE_SECONDS
    before = _workers()
    while before and time.monotonic() < deadline:
        time.sleep(_PAUSE_SECONDS)
        now = _workers()
        if now == before and all(status["State"].startswith("S") for status in now.values()):
            return
        before = now


def _workers() -> dict[str, dict[str, str]]:
    """Return the state of each of gloo's threads, and how often it was scheduled."""
    found = {}
    for thread in _THREADS.iterdir():
        try:
            lines = (thread / "status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread ended meanwhile
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if status["Name"] == _WORKER:
            keys = ("State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
            found[thread.name] = {key: status[key] for key in keys}
    return found
