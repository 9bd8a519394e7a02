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
from moetune.domain.errors import MoetuneError

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
with Lab(num_ranks=2, rate_mbit=200) as lab:
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
def test_every_rank_has_a_network_a_core_and_one_thread() -> None:
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
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_lab_takes_its_ranks_and_namespaces_along(number: signal.Signals) -> None:
    with _owner() as owner:
        assert owner.stdout is not None
        facts = json.loads(owner.stdout.readline())
        assert all(map(_is_held, facts["namespaces"]))
        owner.send_signal(number)
        owner.wait(timeout=20)
    assert _becomes_true(lambda: not any(map(_is_held, facts["namespaces"])))
    assert _becomes_true(lambda: not any(Path("/proc", pid).exists() for pid in facts["ranks"]))


def test_a_rank_that_fails_ends_the_others_and_its_words_are_in_the_error() -> None:
    script = '[ "$RANK" = 1 ] && { echo broken pipe >&2; exit 3; }; sleep 60'
    with (
        Lab(num_ranks=3, rate_mbit=None) as lab,
        pytest.raises(MoetuneError, match=r"rank 1 failed \(exit status 3\)\n  \| broken pipe"),
    ):
        lab.run(["sh", "-c", script], timeout_seconds=30)


def _transfer(lab: Lab, direction: str) -> float:
    argv = [sys.executable, "-c", _TRANSFER, str(_PAYLOAD_BYTES), direction]
    return float(lab.run(argv, timeout_seconds=30)[0].stdout)


@contextmanager
def _owner() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER],
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
