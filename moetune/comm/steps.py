"""Two steps of an exchange, one behind the other: on a CPU by threads, on a GPU by streams.

Each level has a communicator of its own, in which every rank issues the same exchanges in the same
order. While one exchange's rows take their second step, those of the next one take their first.

on a CPU    a thread for each level issues its exchanges, and a third one completes outputs
on a GPU    the caller issues both levels' exchanges at once, the second from a side stream that
            waits for the first; the output is completed on a third stream
"""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from moetune.comm.group import Communicator
from moetune.comm.relay import Counts, columns, sums, transposed
from moetune.comm.transfer import GroupRank, Transfer

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeStep:
    """One of an exchange's two steps, with the blocks that it moves.

    Args:
        give: [target of the level][rank of the other level] rows.
        take: [source of the level][rank of the other level] rows.
    """

    level: Communicator
    name: str
    is_alone: bool
    give: Counts
    take: Counts

    def start(self, rows: torch.Tensor, output: torch.Tensor) -> Transfer:
        """Start the level's all-to-all."""
        give, take = sums(self.give), sums(self.take)
        return self.level.all_to_all(output, rows, take, give, self.name, is_alone=self.is_alone)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """The parts of one exchange, in their order: `begin`, `pass_on`, `finish`.

    Args:
        output: filled in the order of the source ranks.
        rows: in the order of the target ranks.
        is_homeward: the first step is inside the node.
    """

    output: torch.Tensor
    rows: torch.Tensor
    first: ExchangeStep
    second: ExchangeStep
    is_homeward: bool

    def buffers(self) -> "Buffers":
        """Return memory for the rows under way."""
        passing = sum(sums(self.first.take))
        return Buffers(
            sent=self._empty(len(self.rows)) if self.is_homeward else self.rows.detach(),
            received=self._empty(passing), passed=self._empty(passing),
            arrived=self.output if self.is_homeward else self._empty(len(self.output)),
        )  # fmt: skip

    def begin(self, buffers: "Buffers") -> Transfer:
        """Issue the first step."""
        if self.is_homeward:
            transposed(self.rows.detach(), columns(self.first.give), out=buffers.sent)
        return self.first.start(buffers.sent, buffers.received)

    def pass_on(self, buffers: "Buffers", first: Transfer) -> Transfer:
        """Issue the second step, of the rows that came in the first."""
        first.wait()
        transposed(buffers.received, self.first.take, out=buffers.passed)
        return self.second.start(buffers.passed, buffers.arrived)

    def finish(self, buffers: "Buffers", second: Transfer) -> None:
        """Complete the output."""
        second.wait()
        if not self.is_homeward:
            # The mode of the caller, which a thread does not have.
            with torch.inference_mode(self.output.is_inference()):
                transposed(buffers.arrived, self.second.take, out=self.output.detach())

    def _empty(self, num_rows: int) -> torch.Tensor:
        return self.rows.new_empty(num_rows, *self.rows.shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Rows of one exchange before and behind each of its two steps."""

    sent: torch.Tensor
    received: torch.Tensor
    passed: torch.Tensor
    arrived: torch.Tensor


class OnThreads:
    """Exchanges of CPU tensors: one thread issues each level's, one completes outputs."""

    def __init__(self, *levels: Communicator) -> None:
        self._levels = {id(level): _thread("exchange") for level in levels}
        self._arrivals = _thread("arrivals")

    def in_order(self, level: Communicator, issue: Callable[[], T]) -> T:
        """Issue and await another exchange of the level, at its place among those of all ranks."""
        return self._levels[id(level)].submit(issue).result()

    def start(self, exchange: Exchange, name: str, group_rank: GroupRank) -> Transfer:
        """Start an exchange's parts, each in its thread behind those of earlier exchanges."""
        first, second = (self._levels[id(one.level)] for one in (exchange.first, exchange.second))
        begun = first.submit(_begin, exchange)
        passed = second.submit(lambda: _pass_on(exchange, *begun.result()))
        done = self._arrivals.submit(lambda: exchange.finish(*passed.result()))
        return _ThreadedTransfer(done, exchange, name, group_rank)


def _thread(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"moetune {name}")


def _begin(exchange: Exchange) -> tuple[Buffers, Transfer]:
    buffers = exchange.buffers()
    return buffers, exchange.begin(buffers)


def _pass_on(exchange: Exchange, buffers: Buffers, first: Transfer) -> tuple[Buffers, Transfer]:
    return buffers, exchange.pass_on(buffers, first)


class OnStreams:
    """Exchanges of a GPU's tensors: each level's second steps have a stream, and outputs have one.

    All memory is the caller's stream's, which waits for the exchange before it is freed: so no
    other stream's allocations can get it, and none has to be recorded as its user.
    """

    def __init__(self, *levels: Communicator, device: torch.device) -> None:
        self._device = device
        self._levels = {id(level): torch.cuda.Stream(device, priority=-1) for level in levels}
        self._arrivals = torch.cuda.Stream(device, priority=-1)

    def in_order(self, level: Communicator, issue: Callable[[], T]) -> T:  # noqa: ARG002 - the caller issues all of them
        """Issue another exchange of the level."""
        return issue()

    def start(self, exchange: Exchange, name: str, group_rank: GroupRank) -> Transfer:  # noqa: ARG002 - steps have the name
        """Issue both steps; the host waits for neither."""
        # As on a CPU, the tensors are no part of autograd's graph.
        with torch.no_grad():
            buffers = exchange.buffers()
            first = exchange.begin(buffers)
            with torch.cuda.stream(self._levels[id(exchange.second.level)]):
                second = exchange.pass_on(buffers, first)
            with torch.cuda.stream(self._arrivals):
                exchange.finish(buffers, second)
                done = self._arrivals.record_event()
        owner = torch.cuda.current_stream(self._device)
        return _StreamedTransfer(done, owner, (exchange, buffers))


class _StreamedTransfer:
    """An exchange in two steps on streams, whose memory is kept until it is waited for.

    Args:
        owner: the stream that its memory is of.
    """

    def __init__(self, done: torch.cuda.Event, owner: torch.cuda.Stream, kept: object) -> None:
        self._done, self._owner = done, owner
        self._kept: object = kept

    def wait(self) -> None:
        """Order the device's current stream behind both steps."""
        if self._kept is not None:
            torch.cuda.current_stream(self._owner.device).wait_event(self._done)
        self._kept = None

    def future(self) -> torch.futures.Future[object]:
        """Return a future that is complete at once, as NCCL's; waiting for it orders a stream."""
        return _Issued(self._done, self._owner.device)

    def __del__(self) -> None:
        """Wait, where nobody did because of an error: the memory is about to be freed.

        Any thread may come here, and its own current stream does not matter.
        """
        if self._kept is not None:
            with contextlib.suppress(RuntimeError):
                self._owner.wait_event(self._done)


class _Issued(torch.futures.Future[object]):
    """The future of what was issued: complete on the host, and awaited by streams."""

    def __init__(self, done: torch.cuda.Event, device: torch.device) -> None:
        super().__init__()
        self._done, self._device = done, device
        self.set_result(None)

    def wait(self) -> None:
        """Order the device's current stream behind the end."""
        torch.cuda.current_stream(self._device).wait_event(self._done)


class _ThreadedTransfer:
    """An exchange in two steps, under way."""

    def __init__(
        self, done: "Future[None]", exchange: Exchange, name: str, group_rank: GroupRank
    ) -> None:
        self._done, self._name, self._group_rank = done, name, group_rank
        self._tensors: tuple[torch.Tensor, ...] = (exchange.output, exchange.rows)

    def wait(self) -> None:
        """Wait for both steps.

        Raises:
            CollectiveError: one failed.
        """
        try:
            self._done.result()
        except RuntimeError as error:
            raise self._group_rank.error("all_to_all", self._name, self._tensors, error) from error
        self._tensors = ()

    def future(self) -> torch.futures.Future[object]:
        """Return a future that completes with the output."""
        watched: torch.futures.Future[object] = torch.futures.Future()

        def end(done: "Future[None]") -> None:
            error = done.exception()
            if error is None:
                watched.set_result(None)
            else:
                watched.set_exception(error)

        self._done.add_done_callback(end)
        return watched
