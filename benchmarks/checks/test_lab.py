"""The lab on the real kernel: links of a set rate, and nothing left behind, however it ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.netlab.lab import Lab, unsupported_reasons
from moetune.domain.errors import InputError, MoetuneError

_REASONS = unsupported_reasons()
needs_lab = pytest.mark.skipif(bool(_REASONS), reason="; ".join(_REASONS))
_ROOT = Path(__file__).parents[2]
_PAYLOAD_BYTES = 4_000_000

# Every rank sends a payload to rank 0, or rank 0 to every rank, and rank 0 prints the seconds.
_TRANSFER = """
import os, socket, sys, time
rank, size, payload = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[1])
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
def receive(peer):
    left = payload
    while left:
        left -= len(peer.recv(min(left, 1 << 16)))
if rank == 0:
    with socket.create_server(address) as server:
        peers = [server.accept()[0] for _ in range(size - 1)]
    for peer in peers:
        peer.sendall(b"!")
    start = time.monotonic()
    for peer in peers:
        receive(peer) if sys.argv[2] == "in" else peer.sendall(bytes(payload))
    for peer in peers:
        peer.sendall(b"!") if sys.argv[2] == "in" else peer.recv(1)
    print(time.monotonic() - start)
else:
    while True:
        try:
            peer = socket.create_connection(address, timeout=10)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    peer.recv(1)
    peer.sendall(bytes(payload)) if sys.argv[2] == "in" else receive(peer)
    peer.recv(1) if sys.argv[2] == "in" else peer.sendall(b"!")
"""

# Rank 0 and another rank send a payload to each other at once; both print the seconds.
_EXCHANGE = """
import os, socket, sys, threading, time
rank, payload, other = int(os.environ["RANK"]), int(sys.argv[1]), int(sys.argv[2])
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank not in (0, other):
    sys.exit()
if rank == 0:
    with socket.create_server(address) as server:
        peer = server.accept()[0]
while rank:
    try:
        peer = socket.create_connection(address, timeout=10)
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
start = time.monotonic()
sender = threading.Thread(target=lambda: peer.sendall(bytes(payload)))
sender.start()
left = payload
while left:
    left -= len(peer.recv(min(left, 1 << 16)))
print(time.monotonic() - start)
sender.join()
"""

# A lab whose ranks start a child each and sleep; it prints the namespaces and the processes.
_OWNER = """
import json, os, sys
from benchmarks.netlab.lab import Lab
class Ready:
    def write(self, text):
        if "ready" in text:
            spaces = [os.fstat(fd).st_ino for fd in lab._namespaces]
            print(json.dumps({"namespaces": spaces, "ranks": text.split()[1:]}), flush=True)
    def flush(self): pass
with Lab(num_ranks=int(sys.argv[1]), rate_mbit=200, ranks_per_node=int(sys.argv[2])) as lab:
    lab.run(["sh", "-c", "echo ready $$ >&2; exec sleep 60"], timeout_seconds=60, echo=Ready())
"""


@needs_lab
@pytest.mark.parametrize("direction", ["in", "out"])
def test_a_transfer_takes_at_least_the_time_its_link_needs(direction: str) -> None:
    with Lab(num_ranks=3, rate_mbit=200) as lab:
        seconds = _transfer(lab, direction)
    # Two payloads cross rank 0's one link; what the buckets hold may pass at once.
    assert seconds >= (2 * _PAYLOAD_BYTES - 4 * 256 * 1024) * 8 / 200e6


@needs_lab
def test_the_set_rate_decides_how_long_a_transfer_takes() -> None:
    with Lab(num_ranks=2, rate_mbit=50) as slow, Lab(num_ranks=2, rate_mbit=5000) as fast:
        assert _transfer(slow, "out") > _transfer(fast, "out")


@needs_lab
def test_four_megabytes_at_200_mbit_take_at_least_120_ms() -> None:
    with Lab(num_ranks=2, rate_mbit=200) as lab:
        assert _transfer(lab, "out") >= 0.12


@needs_lab
def test_ranks_of_one_node_meet_without_limit_and_nodes_at_the_rate_in_both_directions() -> None:
    with Lab(num_ranks=4, rate_mbit=50, ranks_per_node=2) as lab:
        inside, across = _exchange(lab, 1), _exchange(lab, 2)
    # What the two buckets on the way hold may pass at once.
    assert min(across) >= (_PAYLOAD_BYTES - 2 * 256 * 1024) * 8 / 50e6
    assert min(across) > 4 * max(inside)


@needs_lab
def test_ranks_of_a_node_share_its_one_link() -> None:
    with Lab(num_ranks=4, rate_mbit=200, ranks_per_node=2) as lab:
        seconds = _transfer(lab, "in")
    # Ranks 2 and 3 send a payload each over node 1's link, rank 1 sends inside node 0.
    assert seconds >= (2 * _PAYLOAD_BYTES - 2 * 256 * 1024) * 8 / 200e6


@needs_lab
def test_ranks_of_a_node_are_told_so_as_torchrun_does_and_share_a_core() -> None:
    script = (
        "echo $RANK $LOCAL_RANK $LOCAL_WORLD_SIZE $WORLD_SIZE $GLOO_SOCKET_IFNAME;"
        "taskset -cp $$ | sed 's/.* //'"
    )
    with Lab(num_ranks=4, rate_mbit=200, ranks_per_node=2) as lab:
        outputs = lab.run(["sh", "-c", script], timeout_seconds=20)
    cores = sorted(os.sched_getaffinity(0))
    first, second = str(cores[0]), str(cores[1 % len(cores)])
    assert [output.stdout.split() for output in outputs] == [
        ["0", "0", "2", "4", "eth0", first], ["1", "1", "2", "4", "eth0", first],
        ["2", "0", "2", "4", "eth0", second], ["3", "1", "2", "4", "eth0", second],
    ]  # fmt: skip


def test_loopback_needs_no_lab_and_no_root() -> None:
    with Lab(num_ranks=2, rate_mbit=None) as lab:
        assert _transfer(lab, "in") > 0


@needs_lab
def test_every_rank_has_its_own_network_its_core_and_one_thread() -> None:
    script = (
        "import json, os, socket; print(json.dumps([os.environ['RANK'], os.environ['LOCAL_RANK'],"
        "os.environ['WORLD_SIZE'], os.environ['GLOO_SOCKET_IFNAME'], os.environ['OMP_NUM_THREADS'],"
        "os.environ['EXTRA'], [name for _, name in socket.if_nameindex()],"
        "sorted(os.sched_getaffinity(0)), os.readlink('/proc/self/ns/net')]))"
    )
    with Lab(num_ranks=2, rate_mbit=200) as lab:
        outputs = lab.run([sys.executable, "-c", script], timeout_seconds=20, env={"EXTRA": "x"})
    seen = [json.loads(output.stdout) for output in outputs]
    cores = sorted(os.sched_getaffinity(0))
    for rank, facts in enumerate(seen):
        assert facts[:6] == [str(rank), str(rank), "2", "eth0", "1", "x"]
        assert facts[6] == ["lo", "eth0"]
        assert facts[7] == [cores[rank % len(cores)]]
    namespaces = {facts[8] for facts in seen} | {str(Path("/proc/self/ns/net").readlink())}
    assert len(namespaces) == 3


@needs_lab
def test_a_lab_adds_nothing_to_the_network_of_the_machine() -> None:
    before = sorted(Path("/sys/class/net").iterdir())
    with Lab(num_ranks=2, rate_mbit=200):
        assert sorted(Path("/sys/class/net").iterdir()) == before


@needs_lab
def test_a_closed_lab_leaves_no_namespace() -> None:
    with Lab(num_ranks=2, rate_mbit=200) as lab:
        namespaces = [os.fstat(fd).st_ino for fd in lab._namespaces]
        assert all(map(_is_held, namespaces))
    assert not any(map(_is_held, namespaces))


@needs_lab
@pytest.mark.parametrize(
    ("number", "num_ranks", "ranks_per_node"),
    [
        (signal.SIGTERM, 2, 1),
        (signal.SIGINT, 2, 1),
        (signal.SIGKILL, 2, 1),
        (signal.SIGKILL, 4, 2),
    ],
)
def test_a_killed_lab_takes_its_ranks_and_namespaces_along(
    number: signal.Signals, num_ranks: int, ranks_per_node: int
) -> None:
    with _owner(num_ranks, ranks_per_node) as owner:
        assert owner.stdout is not None
        facts = json.loads(owner.stdout.readline())
        assert all(map(_is_held, facts["namespaces"]))
        owner.send_signal(number)
        owner.wait(timeout=20)
    assert _becomes_true(lambda: not any(map(_is_held, facts["namespaces"])))
    assert _becomes_true(lambda: not any(Path("/proc", pid).exists() for pid in facts["ranks"]))


@needs_lab
def test_what_is_left_of_one_lab_does_not_hinder_the_next() -> None:
    with _owner() as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        with Lab(num_ranks=2, rate_mbit=200) as lab:
            owner.kill()
            assert _transfer(lab, "in") > 0


def test_a_rank_that_fails_ends_the_others_and_its_words_are_in_the_error() -> None:
    script = '[ "$RANK" = 1 ] && { echo broken pipe >&2; exit 3; }; sleep 60'
    with (
        Lab(num_ranks=3, rate_mbit=None) as lab,
        pytest.raises(MoetuneError, match=r"rank 1 failed \(exit status 3\)\n  \| broken pipe"),
    ):
        lab.run(["sh", "-c", script], timeout_seconds=30)


def test_a_rank_that_is_killed_is_named_with_its_signal() -> None:
    with (
        Lab(num_ranks=2, rate_mbit=None) as lab,
        pytest.raises(MoetuneError, match=r"rank 0 failed \(SIGKILL\)"),
    ):
        lab.run(["sh", "-c", '[ "$RANK" = 0 ] && kill -9 $$; sleep 60'], timeout_seconds=30)


def test_a_timeout_kills_every_rank_and_what_it_started(tmp_path: Path) -> None:
    script = f"sleep 60 & echo $$ $! > {tmp_path}/$RANK; wait"
    with (
        Lab(num_ranks=2, rate_mbit=None) as lab,
        pytest.raises(MoetuneError, match="did not end in time"),
    ):
        lab.run(["sh", "-c", script], timeout_seconds=1)
    pids = [pid for rank in "01" for pid in (tmp_path / rank).read_text().split()]
    assert len(pids) == 4
    assert _becomes_true(lambda: not any(map(_is_running, pids)))


def test_output_larger_than_a_pipe_arrives_whole_from_every_rank() -> None:
    with Lab(num_ranks=2, rate_mbit=None) as lab:
        outputs = lab.run(["sh", "-c", "seq 100000; seq 50000 >&2"], timeout_seconds=20)
    for output in outputs:
        assert output.stdout.splitlines() == [str(n) for n in range(1, 100_001)]
        assert len(output.stderr.splitlines()) == 50_000


@pytest.mark.parametrize(
    ("num_ranks", "rate_mbit", "ranks_per_node", "name"),
    [
        (0, 200, 1, "num_ranks"),
        (251, 200, 1, "num_ranks"),
        (2, 0, 1, "rate"),
        (4, 200, 3, "4 ranks do not divide into nodes of 3"),
        (4, 200, 0, "nodes of 0"),
    ],
)
def test_a_lab_that_cannot_be_is_refused(
    num_ranks: int, rate_mbit: float, ranks_per_node: int, name: str
) -> None:
    with pytest.raises(InputError, match=name):
        Lab(num_ranks=num_ranks, rate_mbit=rate_mbit, ranks_per_node=ranks_per_node)


def test_missing_tools_are_named_with_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("without root, that is the reason")
    monkeypatch.setenv("PATH", "/nowhere")
    assert unsupported_reasons() == ("tools are missing: apt-get install iproute2 util-linux",)


def _transfer(lab: Lab, direction: str) -> float:
    argv = [sys.executable, "-c", _TRANSFER, str(_PAYLOAD_BYTES), direction]
    return float(lab.run(argv, timeout_seconds=30)[0].stdout)


def _exchange(lab: Lab, other: int) -> list[float]:
    argv = [sys.executable, "-c", _EXCHANGE, str(_PAYLOAD_BYTES), str(other)]
    outputs = lab.run(argv, timeout_seconds=30)
    return [float(output.stdout) for output in outputs if output.stdout]


@contextmanager
def _owner(num_ranks: int = 2, ranks_per_node: int = 1) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(num_ranks), str(ranks_per_node)],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as owner:
        try:
            yield owner
        finally:
            owner.kill()


def _is_running(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _is_held(inode: int) -> bool:
    """Whether a process lives in the network namespace, has it open, or a mount keeps it."""
    name = f"net:[{inode}]"
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = [process / "ns/net", *(process / "fd").iterdir()]
            if any(str(link.readlink()) == name for link in links):
                return True
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return name in Path("/proc/self/mountinfo").read_text()


def _becomes_true(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False
