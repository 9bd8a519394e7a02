"""Real ranks for tests: processes with gloo over a file store, ended together."""

import datetime as dt
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT_SECONDS = 90


def run_ranks(
    worker: Callable[..., None],
    num_ranks: int,
    *args: object,
    timeout_seconds: int = TIMEOUT_SECONDS,
) -> list[str]:
    """Run `worker(*args)` on every rank and return each rank's traceback, empty when it passed.

    The worker must be importable, because the processes are spawned.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        processes = [
            context.Process(
                target=_rank, args=(worker, rank, num_ranks, folder, timeout_seconds, args)
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
        return [_report(Path(folder) / str(rank)) for rank in range(num_ranks)]


def _report(path: Path) -> str:
    return path.read_text() if path.exists() else "the rank was killed or hung"


def _rank(
    worker: Callable[..., None],
    rank: int,
    num_ranks: int,
    folder: str,
    timeout_seconds: int,
    args: tuple[object, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    report = ""
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=num_ranks,
            timeout=dt.timedelta(seconds=timeout_seconds / 3),
        )
        worker(*args)
    except BaseException:  # noqa: BLE001 - everything a rank raises belongs into its report
        report = traceback.format_exc()
    (Path(folder) / str(rank)).write_text(report)
    os._exit(0)
