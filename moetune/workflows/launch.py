"""Run a function on several ranks of this machine, or on this rank of a launch."""

import ctypes
import datetime as dt
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moetune import config
from moetune.config import Launch
from moetune.domain.errors import CollectiveError, MoetuneError
from moetune.measure.launch import cores_of, keep_large_blocks

_TIMEOUT = dt.timedelta(minutes=5)
_POLL_SECONDS = 0.02
_GRACE_SECONDS = 3.0
_TAIL_LINES = 15
_PDEATHSIG = 1


def run_on_ranks(
    function: Callable[[Any], Any],
    argument: object,
    *,
    num_ranks: int,
    launch: Launch | None,
    environ: Mapping[str, str],
) -> Any:  # noqa: ANN401 - whatever the function returns on rank 0
    """Call `function(argument)` on every rank and return what rank 0 returned.

    Inside a launch this process is a rank and calls the function itself; otherwise `num_ranks`
    processes are started, each with its share of the cores, and none outlives this call.

    Args:
        function: of a module; it finds torch.distributed initialised where ranks are several.

    Raises:
        MoetuneError: what a rank raised, or that one died.
    """
    if launch is not None:
        with _process_group(launch.world_size):
            return function(argument)
    if num_ranks == 1:
        return function(argument)
    with tempfile.TemporaryDirectory(prefix="moetune-") as folder:
        place = Path(folder)
        name = f"{function.__module__}:{function.__qualname__}"
        (place / "argument").write_bytes(pickle.dumps((name, argument)))
        _follow(_start(place, num_ranks, environ), place)
        return pickle.loads((place / "result").read_bytes())  # noqa: S301 - a rank of ours wrote it


def _start(place: Path, num_ranks: int, environ: Mapping[str, str]) -> list[subprocess.Popen[str]]:
    cores = sorted(os.sched_getaffinity(0))
    port = _free_port()
    processes = []
    for rank in range(num_ranks):
        mine = cores_of(rank, num_ranks, cores)
        variables = {
            "OMP_NUM_THREADS": str(len(mine)),
            **environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        with (place / f"errors-{rank}").open("w") as errors:
            command = [sys.executable, "-m", __name__, str(place), ",".join(map(str, mine))]
            processes.append(
                subprocess.Popen(  # noqa: S603 - this program
                    command, env=variables, stdin=subprocess.DEVNULL, stdout=errors,
                    stderr=errors, text=True, start_new_session=True,
                )
            )  # fmt: skip
    return processes


def _follow(processes: list[subprocess.Popen[str]], place: Path) -> None:
    """Wait for all ranks; when one fails, let the others notice for a moment, then end them."""
    failed_at: float | None = None
    try:
        while any(process.poll() is None for process in processes):
            if failed_at is None and any(process.poll() for process in processes):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > _GRACE_SECONDS:
                break
            time.sleep(_POLL_SECONDS)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise _error([process.returncode for process in processes], place)


def _error(codes: list[int], place: Path) -> MoetuneError:
    """Return the error that a rank left, one of its own before one about another rank."""
    left = [pickle.loads(path.read_bytes()) for path in sorted(place.glob("error-*"))]  # noqa: S301 - ranks of ours wrote them
    own = [error for error in left if not isinstance(error, CollectiveError)]
    killed = [rank for rank, code in enumerate(codes) if code < 0]
    if own:
        raise own[0]
    rank = killed[0] if killed else next(rank for rank, code in enumerate(codes) if code)
    if left and not killed:
        raise left[0]
    how = signal.Signals(-codes[rank]).name if codes[rank] < 0 else f"exit status {codes[rank]}"
    tail = (place / f"errors-{rank}").read_text().splitlines()[-_TAIL_LINES:]
    return MoetuneError("\n".join((f"rank {rank} ended with {how}", *(f"  | {x}" for x in tail))))


@contextmanager
def _process_group(world_size: int) -> Iterator[None]:
    """Join the launch's ranks; NCCL where every rank has a GPU, else gloo."""
    if world_size == 1 or dist.is_initialized():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, timeout=_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise CollectiveError(f"the ranks could not meet: {error}") from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _main() -> None:
    """Be one rank of `run_on_ranks`."""
    place, cores = Path(sys.argv[1]), {int(core) for core in sys.argv[2].split(",")}
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    os.sched_setaffinity(0, cores)
    keep_large_blocks()
    launch = config.launch(config.environment())
    rank = launch.rank if launch else 0
    name, argument = pickle.loads((place / "argument").read_bytes())  # noqa: S301 - our parent wrote it
    module, _, function = name.partition(":")
    try:
        call = getattr(importlib.import_module(module), function)
        with _process_group(launch.world_size if launch else 1):
            result = call(argument)
    except MoetuneError as error:
        (place / f"error-{rank}").write_bytes(pickle.dumps(error))
        sys.exit(error.exit_code)
    if rank == 0:
        (place / "result").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _main()
