"""Ranks for a session: this process alone, a launch that it is part of, or ranks of its own."""

import ctypes
import datetime as dt
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import torch
import torch.distributed as dist

from moetune.domain.errors import CollectiveError, InputError, MoetuneError
from moetune.domain.samples import Point, Sample
from moetune.measure.device import open_device
from moetune.measure.ranks import Ranks
from moetune.measure.session import Assignment, Listener, run_session

_TIMEOUT_SECONDS = 120.0
_END_SECONDS = 5.0
_NEWS_SECONDS = 0.2
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER_TRIM = 2**31 - 1

_Message = Mapping[Point, float] | Sample | MoetuneError


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This rank's place in a launch that others made."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def run_here(assignment: Assignment, *, listener: Listener) -> None:
    """Run the session on this process alone."""
    run_session(assignment, device=open_device(), ranks=Ranks(), listener=listener)


def run_joined(
    assignment: Assignment,
    *,
    place: Place,
    listener: Listener,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> None:
    """Run the session as one rank of a launch; all its processes call this together.

    torch.distributed is set up from the launcher's variables, unless it is already.

    Raises:
        CollectiveError: the ranks do not find each other, or one is gone.
    """
    device = open_device(place.local_rank)
    owns_group = not dist.is_initialized()
    if owns_group:
        _join("env://", place.rank, place.world_size, timeout_seconds)
    # Ranks that nobody pinned run on the same cores.
    shared = len(os.sched_getaffinity(0)) == os.cpu_count()
    try:
        run_session(
            assignment,
            device=device,
            ranks=Ranks(timeout_seconds=timeout_seconds),
            listener=listener,
            sharers=place.local_world_size if shared else 1,
        )
    finally:
        if owns_group:
            dist.destroy_process_group()


def run_spawned(
    assignment: Assignment,
    *,
    num_ranks: int,
    listener: Listener,
    timeout_seconds: float = _TIMEOUT_SECONDS,
) -> None:
    """Run the session on ranks of its own on this node, and end them with it.

    Each gets its share of the cores and as many threads. They do not outlive this process,
    however it ends.

    Raises:
        InputError: fewer CUDA devices than ranks; or what the session finds wrong.
        CollectiveError: a rank died.
    """
    if torch.cuda.is_available() and num_ranks > torch.cuda.device_count():
        raise InputError(
            f"{num_ranks} ranks need as many CUDA devices, here are {torch.cuda.device_count()}",
            f"start at most {torch.cuda.device_count()} with --nproc",
        )
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="moetune-") as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        processes = [
            context.Process(
                target=_spawned,
                args=(assignment, rank, num_ranks, Path(folder), sender, timeout_seconds),
                daemon=True,
            )
            for rank, (_, sender) in enumerate(pipes)
        ]
        try:
            for process, (_, sender) in zip(processes, pipes, strict=True):
                process.start()
                sender.close()
            _listen([receiver for receiver, _ in pipes], listener)
            _expect_success(processes)
        except CollectiveError as error:
            raise _dead_rank(processes) or error from None
        finally:
            _end(processes)


def cores_of(rank: int, num_ranks: int, cores: Sequence[int]) -> tuple[int, ...]:
    """Return a rank's share of the cores: disjoint, as long as there are enough."""
    if num_ranks > len(cores):
        return (cores[rank % len(cores)],)
    return tuple(cores[rank * len(cores) // num_ranks : (rank + 1) * len(cores) // num_ranks])


def threads_here() -> int:
    """Return the threads that this process computes with."""
    return torch.get_num_threads()


def keep_large_blocks() -> None:
    """Let this process keep large blocks of host memory that it frees.

    glibc hands them back to the system, and touching new pages costs a CPU rank more than many
    of the operations that fill them. Nothing happens with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)


class _Sender:
    """Tells the process that started the ranks what it would hear itself."""

    def __init__(self, sender: "Connection[_Message, None]") -> None:
        self._sender = sender

    def planned(self, seconds: Mapping[Point, float]) -> None:
        self._sender.send(dict(seconds))

    def measured(self, sample: Sample) -> None:
        self._sender.send(sample)


def _spawned(
    assignment: Assignment,
    rank: int,
    num_ranks: int,
    folder: Path,
    sender: "Connection[_Message, None]",
    timeout_seconds: float,
) -> None:
    # Ctrl-C reaches every process of the terminal: the one that started the ranks decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    keep_large_blocks()
    cores = sorted(os.sched_getaffinity(0))
    mine = cores_of(rank, num_ranks, cores)
    os.sched_setaffinity(0, mine)
    torch.set_num_threads(len(mine))
    code = 0
    try:
        device = open_device(rank)
        _join(f"file://{folder}/rendezvous", rank, num_ranks, timeout_seconds)
        run_session(
            assignment,
            device=device,
            ranks=Ranks(timeout_seconds=timeout_seconds),
            listener=_Sender(sender),
            sharers=-(-num_ranks // len(cores)),
        )
    except MoetuneError as error:
        sender.send(error)
        code = 1
    sender.close()
    # Without torch's own farewell, which waits for ranks that may be gone.
    os._exit(code)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _join(init_method: str, rank: int, world_size: int, timeout_seconds: float) -> None:
    try:
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=dt.timedelta(seconds=timeout_seconds),
        )
    except (RuntimeError, ValueError) as error:
        raise CollectiveError(
            f"rank {rank} of {world_size} does not find the others: {error}",
            "start every rank with torchrun, or this machine's with --nproc",
        ) from error


def _listen(receivers: Sequence["Connection[None, _Message]"], listener: Listener) -> None:
    """Pass on what the ranks tell until all have ended.

    Raises:
        MoetuneError: a rank's own complaint.
    """
    open_ends = list(receivers)
    while open_ends:
        ready = connection.wait(open_ends)
        for end in [one for one in open_ends if one in ready]:
            try:
                message = end.recv()
            except (EOFError, ConnectionError):
                open_ends.remove(end)
                continue
            if isinstance(message, MoetuneError):
                raise message
            if isinstance(message, Sample):
                listener.measured(message)
            else:
                listener.planned(message)


def _dead_rank(processes: Sequence[SpawnProcess]) -> CollectiveError | None:
    """Return an error about the rank that was killed, which says more than the others' loss."""
    for rank, process in enumerate(processes):
        process.join(_NEWS_SECONDS)
        if process.exitcode is not None and process.exitcode < 0:
            name = signal.Signals(-process.exitcode).name
            return CollectiveError(
                f"rank {rank} of {len(processes)} was ended by {name} while it measured",
                "finished points are kept: run again with --resume",
            )
    return None


def _expect_success(processes: Sequence[SpawnProcess]) -> None:
    for rank, process in enumerate(processes):
        process.join(_END_SECONDS)
        if process.exitcode != 0:
            raise CollectiveError(
                f"rank {rank} of {len(processes)} died with exit code {process.exitcode}",
                "see what it printed; finished points are kept: run again with --resume",
            )


def _end(processes: Sequence[SpawnProcess]) -> None:
    for process in processes:
        # Not every process was started where starting one of them failed.
        with suppress(ValueError, AttributeError, AssertionError):
            process.kill()
            process.join(_END_SECONDS)
