"""Real ranks for tests: processes with gloo over a file store, ended together.

Ranks are forked from one process that has imported torch and the runtime already: to start
them takes a tenth of a second, and a rank that is killed or hangs takes no other test with it.
"""

import datetime as dt
import functools
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_SECONDS = 120
PULSE_SECONDS = 0.5
MANY_SECONDS = 10
"""Pauses that a report tells."""
KILLED, _MET = "the rank was killed or hung", ".met"
"""Behind a rank's number: the file that tells that it has met the others."""
ROOT = Path(__file__).resolve().parents[1]
IMPORTED_ONCE = (
    "tests.ranks",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "moetune.runtime.moe.layer",
    "moetune.store",
    "transformers.models.mixtral.modeling_mixtral",
)


@contextmanager
def single_rank_group() -> Iterator[None]:
    """Be the only rank of a process group."""
    store = dist.HashStore()  # type: ignore[attr-defined] # which torch does not say that it exports
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_ranks(
    worker: Callable[..., None],
    num_ranks: int,
    *args: object,
    timeout_seconds: int = TIMEOUT_SECONDS,
) -> list[str]:
    """Run `worker(*args)` on every rank and return each rank's traceback, empty when it passed.

    Ranks that do not all meet are started once more: on a busy machine gloo's connections of all
    with all fail now and then, before any code of ours.

    Args:
        worker: importable, because another process calls it.
    """
    reports, have_met = _run_once(worker, num_ranks, args, timeout_seconds)
    if not have_met:
        reports, _ = _run_once(worker, num_ranks, args, timeout_seconds)
    return reports


def _run_once(
    worker: Callable[..., None], num_ranks: int, args: tuple[object, ...], timeout_seconds: int
) -> tuple[list[str], bool]:
    """Return each rank's report, and whether the worker has begun on all."""
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        processes = [
            warm_context().Process(
                target=_rank,
                args=(worker, rank, num_ranks, folder, timeout_seconds, environment, args),
            )
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(timeout_seconds)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
        have_met = all((Path(folder) / f"{rank}{_MET}").exists() for rank in range(num_ranks))
        paths = [Path(folder) / str(rank) for rank in range(num_ranks)]
        texts = [path.read_text() if path.exists() else KILLED for path in paths]
        return texts, have_met


@functools.cache
def warm_context() -> ForkServerContext:
    """Start the process that all ranks are forked from."""
    context = mp.get_context("forkserver")
    assert isinstance(context, ForkServerContext)
    context.set_forkserver_preload(list(IMPORTED_ONCE))
    with pytest.MonkeyPatch.context() as patch:
        # The server finds modules by its environment alone, and passes over those it does not.
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        forkserver.ensure_running()
    return context


class Pulse(threading.Thread):
    """The longest time for which this process did not run, because it was stopped or starved.

    A rank that others waited for meanwhile leaves them with a timeout that says nothing of it, and
    one that is stopped in an exchange times out itself when it goes on.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest_pause_seconds = 0.0
        self.start()

    def run(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(PULSE_SECONDS)
            now = time.monotonic()
            self.longest_pause_seconds = max(self.longest_pause_seconds, now - last)
            last = now


def _rank(
    worker: Callable[..., None],
    rank: int,
    num_ranks: int,
    folder: str,
    timeout_seconds: int,
    environment: dict[str, str],
    args: tuple[object, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    report, pulse = "", Pulse()
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=num_ranks,
            timeout=dt.timedelta(seconds=timeout_seconds / 3),
        )
        (Path(folder) / f"{rank}{_MET}").touch()
        worker(*args)
    except BaseException:  # noqa: BLE001 - everything a rank raises belongs into its report
        report = traceback.format_exc()
        if pulse.longest_pause_seconds > MANY_SECONDS:
            report += f"\nthe rank did not run for {pulse.longest_pause_seconds:.0f} s\n"
    (Path(folder) / str(rank)).write_text(report)
    os._exit(0)
