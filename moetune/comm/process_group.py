"""The communicator of any torch.distributed group, and its transfers.

torch's errors become CollectiveError here.

Profilers show every collective under its name, in a range "moetune …".

A gloo collective ends for its caller as soon as the data is there. The thread that ran it frees its
tensors a moment later, and needs the interpreter's lock (GIL) for that. If the script has ended
meanwhile, the closing interpreter stops the thread in a C++ destructor, and the process aborts
(pytorch/pytorch#190489). The first communicator therefore registers a wait at exit.
"""

import atexit
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from moetune.comm.group import Communicator, ReduceOp, Transfer
from moetune.domain.errors import CollectiveError, InputError

T = TypeVar("T")

# Names of torch 2.13; earlier versions have only the second of each pair.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_OPS: Mapping[ReduceOp, dist.ReduceOp.RedOpType] = MappingProxyType(
    {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
)
_GLOO_THREAD = "pt_gloo_runloop"
_THREADS = Path("/proc/self/task")
_PAUSE_SECONDS, _PATIENCE_SECONDS, _FIXED_SECONDS = 0.01, 10.0, 0.2
_MANY_RANKS = 16
_ADVICE = "a rank died, left early or was too slow: look at the other ranks' output"
_ADVICE_ON_GPU = (
    "with TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_NCCL_TRACE_BUFFER_SIZE=2000 every rank leaves a list "
    "of its collectives, which torchfrtrace compares"
)


@dataclass(frozen=True, slots=True)
class GroupRank:
    """A rank and its group, as error messages name them.

    Args:
        members: the group's ranks in the world, in order.
    """

    rank: int
    members: tuple[int, ...]

    def error(
        self, collective: str, name: str, tensors: Sequence[torch.Tensor], cause: Exception
    ) -> CollectiveError:
        """Return the error with the collective, the sizes, the group and the rank.

        Args:
            collective: torch's name of the collective.
            name: the caller's name of the collective.
            tensors: the collective's arguments.
        """
        sizes = ", ".join(
            f"{'x'.join(map(str, tensor.shape)) or 1} {str(tensor.dtype).removeprefix('torch.')}"
            for tensor in tensors
        )
        of_sizes = f" of {sizes}" if sizes else ""
        reason = str(cause).splitlines()[0] if str(cause) else repr(cause)
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        return CollectiveError(
            f"{name} failed on rank {self.rank} of {len(self.members)}: {reason} "
            f"({collective}{of_sizes} among {_spelled(self.members)})",
            f"{_ADVICE}; {_ADVICE_ON_GPU}" if on_gpu else _ADVICE,
        )


@dataclass(slots=True)
class GroupTransfer:
    """A transfer in a process group: one or several of torch's `Work` objects."""

    works: Sequence[dist.Work]
    tensors: tuple[torch.Tensor, ...]
    collective: str
    name: str
    group_rank: GroupRank

    def wait(self) -> None:
        """Order the current stream (on a CPU: the caller) after the end of all works.

        Raises:
            CollectiveError: a work failed.
        """
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise self.group_rank.error(self.collective, self.name, self.tensors, error) from error
        self.works, self.tensors = (), ()

    def future(self) -> torch.futures.Future[object]:
        """Return the only work's future; layers' exchanges and sums have a single work."""
        (work,) = self.works
        future: torch.futures.Future[object] = work.get_future()
        return future


def _spelled(members: Sequence[int]) -> str:
    """Return the ranks as text: consecutive ranks by the first and last, others singly."""
    first, last = members[0], members[-1]
    if len(members) > 1 and list(members) == list(range(first, last + 1)):
        return f"ranks {first} to {last} of the world"
    shown = ", ".join(map(str, members[:_MANY_RANKS]))
    return f"ranks {shown}{', …' if len(members) > _MANY_RANKS else ''} of the world"


class GroupCommunicator(Communicator):
    """A torch.distributed group (gloo or NCCL).

    With NCCL a collective runs on the group's stream, after all work issued to the current stream
    so far. A wait orders the current stream after the collective. The tensors live until then, so
    that the caching allocator does not reuse their memory early.

    Args:
        group: the group; the default is the world.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        exit_cleanly()
        self.group: dist.ProcessGroup | None = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.group)
        self.members = tuple(dist.get_process_group_ranks(self.group))
        self._group_rank = GroupRank(self.rank, self.members)

    def __deepcopy__(self, _: object) -> "GroupCommunicator":
        """Return itself: copies share the group."""
        return self

    def __reduce__(self) -> str:
        """Raise InputError: no other process is in the group."""
        raise no_pickle()

    @property
    def device(self) -> torch.device:
        """The CPU if the group has a backend for it, else the current GPU."""
        backends = dist.get_backend_config(self.group).split(",")
        if any(backend.startswith("cpu:") for backend in backends):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def all_to_all(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        name: str,
    ) -> Transfer:
        """Start one all_to_all_single."""
        into = None if output_splits is None else list(output_splits)
        out_of = None if input_splits is None else list(input_splits)
        return self._start(
            "all_to_all", name, (output, rows),
            lambda: (
                dist.all_to_all_single(
                    output, rows, into, out_of, group=self.group, async_op=True
                ),
            ),
        )  # fmt: skip

    def all_reduce(self, values: torch.Tensor, name: str, *, op: ReduceOp = "sum") -> Transfer:
        """Start one all_reduce."""
        return self._start(
            "all_reduce", name, (values,),
            lambda: (dist.all_reduce(values, _OPS[op], group=self.group, async_op=True),),
        )  # fmt: skip

    def all_gather(self, output: torch.Tensor, values: torch.Tensor, name: str) -> Transfer:
        """Start one all-gather of bytes: backends lack some dtypes, which only have to be moved."""
        into, mine = output.view(-1).view(torch.uint8), values.view(-1).view(torch.uint8)
        return self._start(
            "all_gather", name, (output, values),
            lambda: (_ALL_GATHER(into, mine, group=self.group, async_op=True),),
        )  # fmt: skip

    def reduce_scatter(self, total: torch.Tensor, shards: torch.Tensor, name: str) -> Transfer:
        """Start one reduce_scatter."""
        return self._start(
            "reduce_scatter", name, (total, shards),
            lambda: (_REDUCE_SCATTER(total, shards, group=self.group, async_op=True),),
        )  # fmt: skip

    def broadcast(self, values: torch.Tensor, name: str) -> Transfer:
        """Start one broadcast."""
        return self._start(
            "broadcast", name, (values,),
            lambda: (dist.broadcast(values, group=self.group, async_op=True, group_src=0),),
        )  # fmt: skip

    def send_receive(
        self, to: Mapping[int, torch.Tensor], source: Mapping[int, torch.Tensor], name: str
    ) -> Transfer:
        """Start one batch of receives and sends.

        gloo issues in order: with sends first, the neighbours of a late rank would wait to send.
        """
        ops = [
            dist.P2POp(op, values, self.members[peer], self.group)
            for op, parts in ((dist.irecv, source), (dist.isend, to))
            for peer, values in parts.items()
        ]
        tensors = (*to.values(), *source.values())
        # torch refuses an empty batch; a stage without neighbours has it.
        return self._start(
            "send_receive", name, tensors, lambda: dist.batch_isend_irecv(ops) if ops else ()
        )

    def all_gather_object(self, value: T, name: str) -> list[T]:
        """Gather pickles of any length."""
        values: list[T | None] = [None] * self.num_ranks
        with self._blocking("all_gather_object", name):
            dist.all_gather_object(values, value, group=self.group)
        return cast("list[T]", values)

    def broadcast_object(self, value: T, name: str) -> T:
        """Broadcast one pickle."""
        values = [value]
        with self._blocking("broadcast_object", name):
            dist.broadcast_object_list(values, group=self.group, group_src=0)
        return values[0]

    def barrier(self, name: str) -> None:
        """Wait in one barrier."""
        with self._blocking("barrier", name):
            dist.barrier(group=self.group)

    def _start(
        self,
        collective: str,
        name: str,
        tensors: tuple[torch.Tensor, ...],
        issue: Callable[[], Iterable[dist.Work]],
    ) -> Transfer:
        try:
            with _range(name):
                works = tuple(issue())
        except RuntimeError as error:
            raise self._group_rank.error(collective, name, tensors, error) from error
        return GroupTransfer(works, tensors, collective, name, self._group_rank)

    @contextmanager
    def _blocking(self, collective: str, name: str) -> Iterator[None]:
        try:
            with _range(name):
                yield
        except RuntimeError as error:
            raise self._group_rank.error(collective, name, (), error) from error


def no_pickle() -> InputError:
    """Return the error for an object that is pickled with a process group."""
    return InputError(
        "a layer over several ranks cannot be pickled: another process is in no such group",
        "save its state_dict, and load that into a layer that is made there",
    )


def _range(name: str) -> AbstractContextManager[object]:
    """Return a range for a running profiler, else nothing: an unseen range would cost 7 µs, too."""
    is_profiled = torch._C._autograd._profiler_enabled()  # noqa: SLF001 - no public name
    return torch.profiler.record_function(f"moetune {name}") if is_profiled else nullcontext()


@functools.cache
def exit_cleanly() -> None:
    """Register `wait_for_workers` once per process, to run when the interpreter closes.

    It involves no other rank. Handlers of `atexit` that are registered later run before it and may
    use collectives; exit code, output and all other handlers are unchanged.
    """
    atexit.register(wait_for_workers)


def wait_for_workers() -> None:
    """Wait, without the interpreter's lock, until gloo's threads have slept through a pause.

    A thread that still frees tensors is runnable, or wakes as soon as it gets the lock, which is
    free during the pause. Only an idle thread, or a thread in an exchange that no other rank has
    joined, sleeps on. Without Linux's /proc the wait has a fixed length.
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
    """Return the state of each gloo thread, and how often it was scheduled."""
    states = {}
    for thread in _THREADS.iterdir():
        try:
            lines = (thread / "status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread ended meanwhile
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if status["Name"] == _GLOO_THREAD:
            keys = ("State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
            states[thread.name] = {key: status[key] for key in keys}
    return states
