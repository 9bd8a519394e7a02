"""Record when each step of a phase ran, as the measured timeline of a layer.

The executor of `moe` reports every computation and transfer to a `SpanRecorder`.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol, Self

import torch

from moetune.comm.group import Transfer
from moetune.domain.layer import Phase


class Stamp(Protocol):
    """A point in time."""

    def since(self, earlier: Self) -> float:
        """Return the seconds from an earlier stamp of the same device, once this stamp passed."""


class HostStamp:
    """The host's time when it is made."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def since(self, earlier: Self) -> float:
        """Return the seconds from an earlier stamp."""
        return self.seconds - earlier.seconds


class CudaStamp:
    """An event of a stream, because the host's clock would time launches."""

    __slots__ = ("event",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(stream)

    def since(self, earlier: Self) -> float:
        """Return the seconds from an earlier stamp, after waiting until the stream gets here."""
        self.event.synchronize()
        return float(earlier.event.elapsed_time(self.event)) / 1e3


def stamp_now(device: torch.device) -> Stamp:
    """Return the host's time, or an event of the device's current stream."""
    if device.type == "cuda":
        return CudaStamp(torch.cuda.current_stream(device))
    return HostStamp()


_END_SECONDS = 10.0
_Resource = Literal["comp", "comm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSpan:
    """A recorded step; times are in seconds since the recorder was made.

    Args:
        num_bytes: bytes that this rank sent; None for a computation.
    """

    phase: Phase
    name: str
    resource: _Resource
    chunk: int
    start_seconds: float
    end_seconds: float
    num_bytes: int | None = None


class SpanRecorder:
    """A recorder of a phase's steps; this base class records nothing."""

    def compute(self, phase: Phase, name: str, chunk: int) -> AbstractContextManager[None]:  # noqa: ARG002 - not recorded
        """Record the body as a computation."""
        return nullcontext()

    def transfer(
        self, phase: Phase, name: str, chunk: int, transfer: Transfer, num_bytes: int  # noqa: ARG002 - as above
    ) -> Transfer:  # fmt: skip
        """Record an exchange that has just been issued; return it or a wrapper of it.

        Args:
            num_bytes: bytes that this rank sends.
        """
        return transfer


@dataclass(slots=True)
class _Step:
    """A step under way, which begins when it is made; the first observer of the end sets the end.

    It is a context around a body, or a transfer that ends when it has been waited for.
    """

    phase: Phase
    name: str
    chunk: int
    clock: Callable[[], Stamp]
    num_bytes: int | None = None
    transfer: Transfer | None = None
    start: Stamp = field(init=False)
    end: Stamp | None = None
    has_ended: threading.Event | None = None

    def __post_init__(self) -> None:
        self.start = self.clock()

    def set_end(self, _: object = None) -> None:
        """Set the end to now; only the first call counts."""
        if self.end is None:
            self.end = self.clock()
            if self.has_ended is not None:
                self.has_ended.set()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.set_end()

    def wait(self) -> None:
        """Wait for the transfer."""
        assert self.transfer is not None  # noqa: S101 - of a transfer's step alone
        self.transfer.wait()
        self.set_end()

    def future(self) -> torch.futures.Future[object] | None:
        """Return the transfer's future."""
        return None if self.transfer is None else self.transfer.future()


class TimelineRecorder(SpanRecorder):
    """A recorder with the device's clock: stamps of the host, or events of a GPU's stream.

    A body's stamps are in the current stream. A transfer starts when it is issued, or when the
    previous transfer ends: the network serves exchanges in order. It ends when it has completed, as
    seen by a separate thread or stream, or at the latest when it was waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock = HostStamp if device.type != "cuda" else partial(stamp_now, device)
        self._zero = self._clock()
        self._steps: list[_Step] = []
        self._behind_transfers: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._behind_transfers = torch.cuda.Stream(device)

    def compute(self, phase: Phase, name: str, chunk: int) -> AbstractContextManager[None]:
        """Time the body."""
        step = _Step(phase, name, chunk, self._clock)
        self._steps.append(step)
        return step

    def transfer(
        self, phase: Phase, name: str, chunk: int, transfer: Transfer, num_bytes: int
    ) -> Transfer:
        """Record the time of issue and, when the exchange completes, its end."""
        if self._behind_transfers is not None:
            self._follow(phase, name, chunk, transfer, num_bytes, self._behind_transfers)
            return transfer
        step = _Step(phase, name, chunk, self._clock, num_bytes=num_bytes, transfer=transfer)
        self._steps.append(step)
        step.has_ended, future = threading.Event(), transfer.future()
        if future is None:
            step.set_end()
        else:
            future.add_done_callback(step.set_end)
        return step

    def _follow(
        self, phase: Phase, name: str, chunk: int, transfer: Transfer, num_bytes: int,
        stream: torch.cuda.Stream,
    ) -> None:  # fmt: skip
        """Record events around a wait for the exchange, in a separate stream.

        A transfer's future is complete as soon as NCCL has issued it. The first event completes
        when the previous transfer has ended and the computing stream has reached the issue.
        """
        future = transfer.future()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        step = _Step(phase, name, chunk, partial(CudaStamp, stream), num_bytes=num_bytes)
        if future is not None:
            # Not the wait of the transfer, after which nothing holds its tensors.
            with torch.cuda.stream(stream):
                future.wait()
        step.set_end()
        self._steps.append(step)

    def spans(self) -> tuple[RecordedSpan, ...]:
        """Return all spans in the order of their starts, once the last step has ended."""
        spans, previous_end = [], 0.0
        for step in self._steps:
            if step.has_ended is not None:
                step.has_ended.wait(_END_SECONDS)
            end = (step.end or self._clock()).since(self._zero)
            start = step.start.since(self._zero)
            is_transfer = step.num_bytes is not None
            if is_transfer:
                start, previous_end = min(max(start, previous_end), end), max(previous_end, end)
            spans.append(
                RecordedSpan(
                    phase=step.phase, name=step.name, resource="comm" if is_transfer else "comp",
                    chunk=step.chunk, start_seconds=start, end_seconds=end,
                    num_bytes=step.num_bytes,
                )
            )  # fmt: skip
        return tuple(sorted(spans, key=lambda span: span.start_seconds))
