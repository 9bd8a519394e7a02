"""Start one process per rank, read what they write, and let none outlive the others."""

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TextIO

from moetune.domain.errors import MoetuneError

_READ_BYTES = 1 << 16
_TAIL_LINES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutput:
    """What one rank wrote."""

    rank: int
    stdout: str
    stderr: str


@dataclass(slots=True, kw_only=True)
class _Rank:
    number: int
    process: subprocess.Popen[bytes]
    pidfd: int
    written: dict[str, bytearray] = field(
        default_factory=lambda: {"stdout": bytearray(), "stderr": bytearray()}
    )

    def output(self) -> RankOutput:
        texts = {name: text.decode(errors="replace") for name, text in self.written.items()}
        return RankOutput(rank=self.number, stdout=texts["stdout"], stderr=texts["stderr"])

    def kill(self) -> int:
        """Kill the rank and what it started, and return its exit status.

        Its group is killed before it is waited for: until then the number is its own.
        """
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def close(self) -> None:
        """Free the pipes and the handle."""
        os.close(self.pidfd)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


_Event = tuple[_Rank, Literal["stdout", "stderr", "end"]]


def run_ranks(
    commands: Sequence[Sequence[str]],
    *,
    envs: Sequence[Mapping[str, str]],
    pass_fds: Sequence[Sequence[int]],
    timeout_seconds: float,
    echo: TextIO | None,
) -> tuple[RankOutput, ...]:
    """Run one command per rank until all have ended.

    Args:
        envs: the whole environment, per rank.
        pass_fds: file descriptors that the rank inherits, per rank.
        echo: where rank 0's stderr goes while it runs.

    Raises:
        MoetuneError: a rank failed or the time was over; every rank is dead by then.
    """
    ranks: list[_Rank] = []
    try:
        for number, (command, env, fds) in enumerate(zip(commands, envs, pass_fds, strict=True)):
            process = _start(command, env, fds)
            ranks.append(_Rank(number=number, process=process, pidfd=os.pidfd_open(process.pid)))
        _follow(ranks, deadline=time.monotonic() + timeout_seconds, echo=echo)
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.close()
    return tuple(rank.output() for rank in ranks)


def _start(
    command: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=env,
        pass_fds=pass_fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _follow(ranks: Sequence[_Rank], *, deadline: float, echo: TextIO | None) -> None:
    with selectors.DefaultSelector() as events:
        for rank in ranks:
            _watch(events, rank)
        while events.get_map():
            ready = events.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise MoetuneError(
                    f"the ranks did not end in time{_tail(ranks[0])}",
                    "a rank waits for another, or the time-out is too short for this rate",
                )
            for key, _ in ready:
                _handle(events, key, echo)


def _watch(events: selectors.BaseSelector, rank: _Rank) -> None:
    process = rank.process
    assert process.stdout is not None  # noqa: S101 - a pipe, as asked
    assert process.stderr is not None  # noqa: S101 - a pipe, as asked
    events.register(process.stdout, selectors.EVENT_READ, (rank, "stdout"))
    events.register(process.stderr, selectors.EVENT_READ, (rank, "stderr"))
    events.register(rank.pidfd, selectors.EVENT_READ, (rank, "end"))


def _handle(
    events: selectors.BaseSelector, key: selectors.SelectorKey, echo: TextIO | None
) -> None:
    data: _Event = key.data
    rank, what = data
    if what == "end":
        events.unregister(key.fileobj)
        _check_end(rank)
        return
    block = os.read(key.fd, _READ_BYTES)
    if not block:
        events.unregister(key.fileobj)
        return
    rank.written[what] += block
    if echo is not None and rank.number == 0 and what == "stderr":
        echo.write(block.decode(errors="replace"))
        echo.flush()


def _check_end(rank: _Rank) -> None:
    code = rank.kill()
    if code:
        assert rank.process.stderr is not None  # noqa: S101 - a pipe, as asked
        os.set_blocking(rank.process.stderr.fileno(), False)
        rank.written["stderr"] += rank.process.stderr.read() or b""
        died = f"exit status {code}" if code > 0 else signal.Signals(-code).name
        raise MoetuneError(f"rank {rank.number} failed ({died}){_tail(rank)}")


def _tail(rank: _Rank) -> str:
    lines = rank.output().stderr.splitlines()[-_TAIL_LINES:]
    return "".join(f"\n  | {line}" for line in lines)
