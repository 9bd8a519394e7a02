"""Launch of a function on several ranks of this machine, or on this rank under `torchrun`.

`python -m moetune.app.launch` is a started rank: it gets the call through a pipe, joins the
process group, and sends messages, the result or an error back. Its output goes to an unnamed file,
so nothing is left when any process is killed. `torch.multiprocessing` would import the caller's
program again in every rank, and scripts and notebooks would have to be written for that.
"""

import datetime as dt
import importlib
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import IO, Any, NoReturn

import torch
import torch.distributed as dist

from moetune import config
from moetune.config import Launch
from moetune.domain.errors import CollectiveError, InputError, MoetuneError
from moetune.hardware.detect import num_cores

_TIMEOUT = dt.timedelta(minutes=5)
_GRACE_SECONDS = 3.0
_TAIL_LINES = 15
_HERE = "127.0.0.1"
_KEEPS_BLOCKS: Mapping[str, str] = MappingProxyType({
    "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": f"{2**31 - 1}",
})  # fmt: skip
"""Keeps glibc from returning large freed blocks to the system: on a CPU rank, touching new pages
costs more than many operations that fill them. Other C libraries ignore these variables."""
_MEETS_LAUNCHER: Mapping[str, str] = MappingProxyType({
    "MASTER_ADDR": _HERE, "GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "0",
})  # fmt: skip
"""Environment of every rank: ranks connect to the TCPStore of the process that started them."""

Send = Callable[[Any], object]
"""Function that takes a message, which a rank sends while it works."""
RankFunction = Callable[[Any, Send], Any]
"""Function that runs on a rank with an argument and a function to send messages."""


def run_on_ranks(
    function: RankFunction,
    argument: object,
    *,
    num_ranks: int,
    launch: Launch | None,
    environ: Mapping[str, str],
    on_message: Send = lambda _: None,
    oversubscribe: bool,
) -> Any:  # noqa: ANN401 - whatever the function returns on rank 0
    """Call `function(argument, send)` on every rank and return the result of rank 0.

    Inside a launch this process is a rank and calls the function itself. Otherwise it starts
    `num_ranks` processes, each with its share of the cores and a thread for each core. They end
    with this call or with this process, even if this process is killed.

    Args:
        function: defined at the top level of a module. With several ranks torch.distributed is
            initialised before the call.
        on_message: called with each message that a rank sends, while the ranks work.
        oversubscribe: whether ranks may share a core; they never share a GPU.

    Raises:
        InputError: there are fewer CUDA devices or cores than ranks.
        CollectiveError: a rank died.
        MoetuneError: the error that a rank raised.
    """
    if launch is not None:
        with _process_group(launch):
            return function(argument, on_message)
    if num_ranks == 1:
        return function(argument, on_message)
    _check_room(num_ranks, oversubscribe=oversubscribe)
    call = f"{function.__module__}:{function.__qualname__}", argument
    # The ranks meet at this process, whose open port no other program can take.
    meeting = dist.TCPStore(  # type: ignore[attr-defined] # it is documented
        _HERE, 0, is_master=True, wait_for_workers=False
    )
    ranks: list[_Rank] = []
    try:
        _start(ranks, num_ranks, {**environ, "MASTER_PORT": str(meeting.port)})
        for rank in ranks:
            with suppress(OSError):  # it has ended, which `_follow` tells
                rank.pipe.send(call)
        return _follow(ranks, on_message)
    finally:
        for rank in ranks:
            with rank.process, rank.pipe, rank.output:
                rank.process.kill()


def _check_room(num_ranks: int, *, oversubscribe: bool) -> None:
    """Raise InputError unless there is a device, or a core, for every rank."""
    if torch.cuda.is_available():
        if num_ranks > (count := torch.cuda.device_count()):
            raise InputError(
                f"{num_ranks} ranks need as many CUDA devices, here are {count}",
                f"start at most {count} with --nproc, or each on a separate device with torchrun",
            )
    elif num_ranks > (cores := num_cores()) and not oversubscribe:
        raise InputError(
            f"{num_ranks} ranks need a core each, here are {cores}: sharing them, ranks measure "
            "how they disturb each other",
            f"start at most {cores} with --nproc, each on a separate machine with torchrun, or "
            "add --oversubscribe",
        )


def rank_device() -> torch.device:
    """Return the CUDA device of this rank's local rank, or the only visible GPU; else the CPU."""
    return _device_of(config.launch(config.environment()))


def _device_of(launch: Launch | None) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = launch.local_rank if launch else 0
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def leave(code: int) -> NoReturn:
    """End this rank after its work with `os._exit`, which skips the interpreter's shutdown.

    A gloo thread may still hold the tensors of its last operation, above all those of
    DistributedDataParallel. Freeing them while the interpreter shuts down aborts the process
    (pytorch/pytorch#190489).
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def cores_of(rank: int, num_ranks: int, cores: Sequence[int]) -> tuple[int, ...]:
    """Return a rank's share of the cores; shares are disjoint if there are enough cores."""
    if num_ranks > len(cores):
        return (cores[rank % len(cores)],)
    return tuple(cores[rank * len(cores) // num_ranks : (rank + 1) * len(cores) // num_ranks])


@dataclass(slots=True, kw_only=True)
class _Rank:
    """A started rank and its result or error."""

    number: int
    process: "subprocess.Popen[bytes]"
    pipe: "Connection[Any, Any]"
    output: IO[bytes]
    result: object = None
    error: MoetuneError | None = None
    has_ended: bool = False


def _start(ranks: list[_Rank], num_ranks: int, environ: Mapping[str, str]) -> None:
    """Start every rank and append it to `ranks`; the caller ends them, even after an error here."""
    cores = sorted(os.sched_getaffinity(0))
    for number in range(num_ranks):
        mine = cores_of(number, num_ranks, cores)
        pipe, end = multiprocessing.Pipe()
        output = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
        variables = {
            **environ, **_MEETS_LAUNCHER, **_KEEPS_BLOCKS, "OMP_NUM_THREADS": str(len(mine)),
            "RANK": str(number), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(number),
            "LOCAL_WORLD_SIZE": str(num_ranks),
        }  # fmt: skip
        # A separate session: Ctrl-C interrupts this process alone, which then ends the ranks.
        with end:
            process = subprocess.Popen(  # noqa: S603 - this program
                [sys.executable, "-m", __name__, str(end.fileno()), ",".join(map(str, mine))],
                env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                pass_fds=[end.fileno()], start_new_session=True,
            )  # fmt: skip
        ranks.append(_Rank(number=number, process=process, pipe=pipe, output=output))


def _follow(ranks: Sequence[_Rank], on_message: Send) -> object:
    """Receive from the ranks until all have ended; after a failure the others get 3 s to end."""
    deadline: float | None = None
    while running := {rank.pipe: rank for rank in ranks if not rank.has_ended}:
        patience = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        ready = connection.wait(list(running), patience)
        if not ready:
            break
        for rank in (running[end] for end in ready if isinstance(end, Connection)):
            _receive(rank, on_message)
            failed = rank.error or (rank.has_ended and rank.process.returncode)
            if failed and deadline is None:
                deadline = time.monotonic() + _GRACE_SECONDS
    if deadline is not None:
        raise _error(ranks)
    return ranks[0].result


def _receive(rank: _Rank, on_message: Send) -> None:
    """Take a message, the result or the error from a rank's pipe, or note that it has ended."""
    try:
        kind, value = rank.pipe.recv()
    except (EOFError, ConnectionError):
        rank.has_ended = True
        with suppress(subprocess.TimeoutExpired):
            rank.process.wait(_GRACE_SECONDS)
        return
    if kind == "message":
        on_message(value)
    elif kind == "returned":
        rank.result = value
    else:
        rank.error = value


def _error(ranks: Sequence[_Rank]) -> MoetuneError:
    """Return the likely cause: a rank's error, else a killed rank, else a failed collective."""
    raised = [rank.error for rank in ranks if rank.error is not None]
    causes = [error for error in raised if not isinstance(error, CollectiveError)]
    died = [rank for rank in ranks if rank.has_ended and rank.process.returncode and not rank.error]
    killed = [rank for rank in died if rank.process.returncode < 0]
    if causes:
        return causes[0]
    if raised and not killed:
        return raised[0]
    rank = (killed or died)[0]
    code = rank.process.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    rank.output.seek(0)
    tail = rank.output.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
    lines = (f"rank {rank.number} of {len(ranks)} {how}", *(f"  | {line}" for line in tail))
    return CollectiveError("\n".join(lines))


@contextmanager
def _process_group(launch: Launch) -> Iterator[None]:
    """Join the launch's process group, with NCCL and gloo if there are GPUs, else with gloo alone.

    This rank's GPU becomes the current device. Otherwise code that names no device, and NCCL's
    barrier, would use the first GPU on every rank and take half a gigabyte of its memory.
    """
    device = _device_of(launch)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if launch.world_size == 1 or dist.is_initialized():
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        dist.init_process_group(backend, timeout=_TIMEOUT)
        # A rank that ends at once would break the connections that another is still making.
        dist.all_reduce(torch.zeros(1, device="cpu"))
    except (RuntimeError, ValueError) as error:
        raise CollectiveError(
            f"rank {launch.rank} of {launch.world_size} cannot reach the others: {error}",
            "start every rank with torchrun, or this machine's with --nproc",
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def _main() -> None:
    descriptor, cores = sys.argv[1:]
    pipe: Connection[Any, Any] = Connection(int(descriptor))
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    name, argument = pipe.recv()
    threading.Thread(target=_leave_with_parent, args=[pipe], daemon=True).start()
    module, _, function = name.partition(":")
    launch = config.launch(config.environment())
    try:
        call: RankFunction = getattr(importlib.import_module(module), function)
        with _process_group(launch) if launch else nullcontext():
            result = call(argument, lambda message: pipe.send(("message", message)))
    except MoetuneError as error:
        pipe.send(("raised", error))
        leave(error.exit_code)
    if launch is None or launch.rank == 0:
        pipe.send(("returned", result))
    leave(0)


def _leave_with_parent(pipe: "Connection[Any, Any]") -> None:
    """End this process when the pipe closes: the parent has ended, or was killed."""
    with suppress(EOFError, OSError):
        pipe.recv()
    os._exit(1)


if __name__ == "__main__":
    _main()
