"""Ranks in network namespaces of their own, joined by shaped links.

    rank 0 [eth0]──tbf──┐                    ┌──tbf──[eth0] rank 1
                        └─[port0  br0  port1]─┘
                              the switch

Each end of each cable carries a token bucket: the rank's end limits what it sends, the
switch's end what it receives, so a rank has one full-duplex link however many send to it.

No namespace has a name. The lab holds them open by file descriptors, the ranks by living in
them, and the ranks die with the lab (PR_SET_PDEATHSIG). So the kernel frees namespaces, cables
and bridge as soon as the last of these processes ends, however it ends: there is nothing to
sweep after a `kill -9`, nothing shows up in the machine's own network, and any number of labs
coexist with the same addresses. Named namespaces (`ip netns add`) are mounts that outlive their
owner, and would need a sweep.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self, TextIO

from benchmarks.netlab.processes import RankOutput, run_ranks
from moetune.domain.errors import InputError, MoetuneError
from tests.ports import free_port

_MAX_RANKS = 250
_BURST = "256kb"
_LATENCY = "50ms"
# For every variant alike: a process that hands large blocks back pays for new pages each time.
_ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
_TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "taskset": "util-linux",
}


class Lab:
    """A lab of `num_ranks` ranks, each with one link to a switch. Use it in a `with`.

    Args:
        rate_mbit: rate of each link in each direction, in 10⁶ bits a second; None for plain
            loopback, with no namespaces and no shaping.

    Raises:
        InputError: a number of ranks or a rate that cannot be built.
        MoetuneError: on entry, where the machine cannot build a lab; it says what is missing.
    """

    def __init__(self, *, num_ranks: int, rate_mbit: float | None) -> None:
        if not 1 <= num_ranks <= _MAX_RANKS:
            raise InputError(f"num_ranks must be from 1 to {_MAX_RANKS}, got {num_ranks}")
        if rate_mbit is not None and rate_mbit < 1:
            raise InputError(f"rate_mbit must be at least 1, got {rate_mbit}")
        self.num_ranks = num_ranks
        self.rate_mbit = rate_mbit
        self._namespaces: tuple[int, ...] = ()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        if self.rate_mbit is None:
            return self
        check_supported()
        with ExitStack() as opening:
            self._build(opening, rate=f"{round(self.rate_mbit * 1000)}kbit")
            self._open = opening.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._namespaces = ()
        self._open.close()

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_seconds: float,
        env: Mapping[str, str] | None = None,
        echo: TextIO | None = None,
    ) -> tuple[RankOutput, ...]:
        """Run one command on every rank, with one thread, pinned to a core.

        The environment has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and
        GLOO_SOCKET_IFNAME. Call it from the main thread: the ranks die with their caller's.

        Args:
            env: further variables; they win.
            echo: where rank 0's stderr (its progress) goes while it runs.

        Returns:
            What each rank wrote, by rank.

        Raises:
            MoetuneError: a rank failed or the time was over; every rank is dead by then.
        """
        cores = sorted(os.sched_getaffinity(0))
        # A namespace has all its ports free; ranks may name shared memory by address and port.
        port = free_port()
        commands = [
            ["setpriv", "--pdeathsig", "KILL", "--", "taskset", "-c", str(cores[rank % len(cores)])]
            + (_enter(self._namespaces[rank]) if self._namespaces else [])
            + list(argv)
            for rank in range(self.num_ranks)
        ]
        return run_ranks(
            commands,
            envs=[self._env(rank, port) | dict(env or {}) for rank in range(self.num_ranks)],
            pass_fds=[(fd,) for fd in self._namespaces] or [()] * self.num_ranks,
            timeout_seconds=timeout_seconds,
            echo=echo,
        )

    def _env(self, rank: int, port: int) -> dict[str, str]:
        return {
            **os.environ,
            **_ALLOCATOR,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": _address(0) if self._namespaces else "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "eth0" if self._namespaces else "lo",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # there is no name service to look hosts up in
        }

    def _build(self, opening: ExitStack, *, rate: str) -> None:
        switch = _new_namespace(opening)
        ranks = tuple(_new_namespace(opening) for _ in range(self.num_ranks))
        _inside(switch, "ip link add br0 type bridge")
        _inside(switch, "ip link set br0 up")
        for number, rank in enumerate(ranks):
            _plug(rank=rank, number=number, switch=switch)
            _shape(switch, f"port{number}", rate)
            _shape(rank, "eth0", rate)
        self._namespaces = ranks


def unsupported_reasons() -> tuple[str, ...]:
    """Return why this machine can build no lab, each with what to do; empty when it can."""
    if sys.platform != "linux":
        return ("network namespaces need Linux",)
    if os.geteuid() != 0:
        return ("network namespaces need root: run it as root, as in `sudo make netlab`",)
    missing = sorted({package for tool, package in _TOOLS.items() if not _has(tool)})
    if missing:
        return (f"tools are missing: apt-get install {' '.join(missing)}",)
    with ExitStack() as opening:
        try:
            scratch = _new_namespace(opening)
            _inside(scratch, "ip link add here type veth peer name there")
            _shape(scratch, "here", "1mbit")
        except MoetuneError as error:
            return (f"{error.what} (the kernel needs veth, bridge and sch_tbf)",)
    return ()


def check_supported() -> None:
    """Raise MoetuneError, which says what to do, where this machine can build no lab."""
    if reasons := unsupported_reasons():
        raise MoetuneError(f"the network lab cannot run: {'; '.join(reasons)}")


def _has(tool: str) -> bool:
    return any(
        os.access(os.path.join(folder, tool), os.X_OK)  # noqa: PTH118 - PATH may hold ""
        for folder in os.get_exec_path()
    )


def _address(rank: int) -> str:
    return f"10.0.0.{rank + 1}"


def _new_namespace(opening: ExitStack) -> int:
    """Return a file descriptor of a new network namespace, which lives while it is open."""
    with subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo; read line"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None  # noqa: S101 - a pipe, as asked
        assert holder.stderr is not None  # noqa: S101 - a pipe, as asked
        if not holder.stdout.readline():
            raise MoetuneError(f"no network namespace: {holder.stderr.read().decode().strip()}")
        namespace = os.open(f"/proc/{holder.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        opening.callback(os.close, namespace)
        _inside(namespace, "ip link set lo up")
        holder.communicate(b"\n")
    return namespace


def _enter(namespace: int) -> list[str]:
    return ["nsenter", f"--net=/proc/self/fd/{namespace}", "--"]


def _inside(namespace: int, command: str, *, also: tuple[int, ...] = ()) -> None:
    done = subprocess.run(
        [*_enter(namespace), *command.split()],
        pass_fds=(namespace, *also),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise MoetuneError(f"`{command}` failed: {done.stderr.strip() or done.stdout.strip()}")


def _plug(*, rank: int, number: int, switch: int) -> None:
    port = f"port{number}"
    peer = f"/proc/self/fd/{rank}"
    _inside(switch, f"ip link add {port} type veth peer name eth0 netns {peer}", also=(rank,))
    _inside(switch, f"ip link set {port} master br0 up")
    _inside(rank, f"ip address add {_address(number)}/24 dev eth0")
    _inside(rank, "ip link set eth0 up")


def _shape(namespace: int, device: str, rate: str) -> None:
    bucket = f"tbf rate {rate} burst {_BURST} latency {_LATENCY}"
    _inside(namespace, f"tc qdisc replace dev {device} root {bucket}")
