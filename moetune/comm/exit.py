"""A clean end for a job that used gloo: its threads let go of their tensors while Python lives.

A collective of gloo is over for its caller as soon as the data is there. The thread that ran it
drops its tensors a moment later, and needs the interpreter's lock for that. Where the script has
ended meanwhile, the closing interpreter ends the thread in the middle of a C++ destructor, and
the process aborts: "terminate called without an active exception" (pytorch/pytorch#190489).
"""

import atexit
import functools
import time
from pathlib import Path

_WORKER = "pt_gloo_runloop"
_THREADS = Path("/proc/self/task")
_PAUSE_SECONDS = 0.01
_PATIENCE_SECONDS = 10.0
_BLIND_SECONDS = 0.2


@functools.cache
def exit_cleanly() -> None:
    """See to it, once a process, that gloo's threads have let go before the interpreter closes.

    Nothing is asked of the other ranks. Handlers of `atexit` that are registered later run
    first and may use collectives; exit code, output and all other handlers stay what they are.
    """
    atexit.register(let_go)


def let_go() -> None:
    """Wait, without the interpreter's lock, until gloo's threads have slept through a pause.

    A thread that still drops tensors is runnable, or wakes as soon as it gets the lock, which is
    free during the pause: only one with nothing to do, or with an exchange that no other rank
    has joined, sleeps on. Without Linux's /proc the wait is blind.
    """
    if not _THREADS.is_dir():
        time.sleep(_BLIND_SECONDS)
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
    """Return the state of gloo's threads and how often each was scheduled, by thread."""
    found = {}
    for thread in _THREADS.iterdir():
        try:
            lines = (thread / "status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if status["Name"] == _WORKER:
            kept = ("State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
            found[thread.name] = {key: status[key] for key in kept}
    return found
