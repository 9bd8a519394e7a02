"""Record when each step of a phase ran: the measured timeline of a layer.

The executor of `moe` reports every computation and transfer to a `SpanRecorder`.
"""

import abc
import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from moetune.comm.transfer import Transfer
from moetune.domain.layer import Phase

_END_SECONDS = 10.0
_Resource = Literal["comp", "comm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSpan:
    """One step; times in seconds since the recorder was made.

    Args:
        num_bytes: that this rank sent; None for a computation.
    """

    phase: Phase
    name: str
    resource: _Resource
    chunk: int
    start_seconds: float
    end_seconds: float
    num_bytes: int | None = None


class SpanRecorder(Protocol):
    """Records the steps of a phase."""

    def compute(
        self, phase: Phase, name: str, chunk: int
    ) -> contextlib.AbstractContextManager[None]:
        """Record the body as one computation."""

    def exchange(
        self, phase: Phase, name: str, chunk: int, num_bytes: int
    ) -> contextlib.AbstractContextManager[None]:
        """Record the body as one exchange that is not overlapped."""

    def transfer(
        self, phase: Phase, name: str, chunk: int, transfer: Transfer, num_bytes: int
    ) -> Transfer:
        """Record an exchange that has just been issued, and return it, perhaps wrapped.

        Args:
            num_bytes: that this rank sends.
        """


class NoRecorder:
    """Records nothing."""

    def compute(self, *_: object) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    exchange = compute

    def transfer(
        self, phase: Phase, name: str, chunk: int, transfer: Transfer, num_bytes: int  # noqa: ARG002 - not recorded
    ) -> Transfer:  # fmt: skip
        """Return the exchange."""
        return transfer


class _Issued:
    """An exchange under way; the thread that completes it sets its end."""

    def __init__(
        self, phase: Phase, name: str, chunk: int, start_seconds: float, num_bytes: int
    ) -> None:
        self.phase: Phase = phase
        self.name, self.chunk, self.start_seconds = name, chunk, start_seconds
        self.end_seconds, self.num_bytes = start_seconds, num_bytes
        self.ended = threading.Event()

    def end(self, seconds: float) -> None:
        self.end_seconds = seconds
        self.ended.set()


class _BodyRecorder(abc.ABC):
    """Times what blocks its caller or its stream, computation or exchange, in the same way."""

    def compute(
        self, phase: Phase, name: str, chunk: int
    ) -> contextlib.AbstractContextManager[None]:
        """Time the body."""
        return self._time(phase, name, chunk, "comp")

    def exchange(
        self, phase: Phase, name: str, chunk: int, num_bytes: int
    ) -> contextlib.AbstractContextManager[None]:
        """Time the body."""
        return self._time(phase, name, chunk, "comm", num_bytes)

    @abc.abstractmethod
    def _time(
        self,
        phase: Phase,
        name: str,
        chunk: int,
        resource: _Resource,
        num_bytes: int | None = None,
    ) -> contextlib.AbstractContextManager[None]: ...


class HostRecorder(_BodyRecorder):
    """Records with the host's clock: right on a CPU, where computing blocks the caller.

    An exchange starts when it is issued or when the one before it ends: the wire serves exchanges
    in order.
    """

    def __init__(self) -> None:
        self._zero = time.perf_counter()
        self._blocking: list[RecordedSpan] = []
        self._issued: list[_Issued] = []

    def transfer(
        self, phase: Phase, name: str, chunk: int, transfer: Transfer, num_bytes: int
    ) -> Transfer:
        """Record the time of issue and, when the exchange completes, of its end."""
        issued = _Issued(phase, name, chunk, self._now(), num_bytes)
        self._issued.append(issued)
        future = transfer.future()
        if future is None:
            issued.end(self._now())
        else:
            future.add_done_callback(lambda _: issued.end(self._now()))
        return transfer

    def spans(self) -> tuple[RecordedSpan, ...]:
        """Return all spans in the order of their starts, once the last exchange has ended.

        The recorded end may be late, where the completing thread had to wait for the interpreter:
        a dispatch ends at the latest when its chunk's computation starts.
        """
        spans, previous_end = list(self._blocking), 0.0
        computed = {
            (span.phase, span.chunk): span.start_seconds
            for span in self._blocking
            if span.resource == "comp"
        }
        for one in self._issued:
            one.ended.wait(_END_SECONDS)
            latest = computed.get((one.phase, one.chunk)) if one.name == "dispatch" else None
            end = one.end_seconds if latest is None else min(one.end_seconds, latest)
            start = min(max(one.start_seconds, previous_end), end)
            previous_end = max(previous_end, end)
            spans.append(
                RecordedSpan(
                    phase=one.phase, name=one.name, resource="comm", chunk=one.chunk,
                    start_seconds=start, end_seconds=end, num_bytes=one.num_bytes,
                )
            )  # fmt: skip
        return tuple(sorted(spans, key=lambda span: span.start_seconds))

    @contextlib.contextmanager
    def _time(
        self,
        phase: Phase,
        name: str,
        chunk: int,
        resource: _Resource,
        num_bytes: int | None = None,
    ) -> Iterator[None]:
        start = self._now()
        yield
        self._blocking.append(
            RecordedSpan(
                phase=phase, name=name, resource=resource, chunk=chunk,
                start_seconds=start, end_seconds=self._now(), num_bytes=num_bytes,
            )
        )  # fmt: skip

    def _now(self) -> float:
        return time.perf_counter() - self._zero


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """One step between two events."""

    phase: Phase
    name: str
    resource: _Resource
    chunk: int
    start: torch.cuda.Event
    end: torch.cuda.Event
    num_bytes: int | None


class CudaRecorder(_BodyRecorder):
    """Records with a GPU's events: the host's clock would time launches.

    A body's events are in the current stream. A transfer's future is complete as soon as NCCL has
    issued it, so a stream that nothing else uses waits for the transfer, between two events. The
    first one is over when the transfer before it has ended, and when the computing stream has
    reached the issue: the wire serves exchanges in order.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._behind_transfers = torch.cuda.Stream(device)
        self._zero = self._mark(torch.cuda.current_stream(device))
        self._steps: list[_Timed] = []

    def transfer(
        self, phase: Phase, name: str, chunk: int, transfer: Transfer, num_bytes: int
    ) -> Transfer:
        """Record events around a wait for the exchange, in a stream of their own."""
        stream, future = self._behind_transfers, transfer.future()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        start = self._mark(stream)
        if future is not None:
            # Not the transfer's own wait, after which nothing holds its tensors.
            with torch.cuda.stream(stream):
                future.wait()
        step = _Timed(
            phase=phase, name=name, resource="comm", chunk=chunk, start=start,
            end=self._mark(stream), num_bytes=num_bytes,
        )  # fmt: skip
        self._steps.append(step)
        return transfer

    def spans(self) -> tuple[RecordedSpan, ...]:
        """Return all spans in the order of their starts, once the last step has ended."""
        for step in self._steps:
            step.end.synchronize()
        spans = (
            RecordedSpan(
                phase=step.phase, name=step.name, resource=step.resource, chunk=step.chunk,
                start_seconds=self._zero.elapsed_time(step.start) / 1e3,
                end_seconds=self._zero.elapsed_time(step.end) / 1e3, num_bytes=step.num_bytes,
            )
            for step in self._steps
        )  # fmt: skip
        return tuple(sorted(spans, key=lambda span: span.start_seconds))

    @contextlib.contextmanager
    def _time(
        self,
        phase: Phase,
        name: str,
        chunk: int,
        resource: _Resource,
        num_bytes: int | None = None,
    ) -> Iterator[None]:
        stream = torch.cuda.current_stream(self._device)
        start = self._mark(stream)
        yield
        step = _Timed(
            phase=phase, name=name, resource=resource, chunk=chunk, start=start,
            end=self._mark(stream), num_bytes=num_bytes,
        )  # fmt: skip
        self._steps.append(step)

    @staticmethod
    def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event


def recorder_of(device: torch.device) -> HostRecorder | CudaRecorder:
    """Return a recorder with the clock of a device."""
    return CudaRecorder(device) if device.type == "cuda" else HostRecorder()
