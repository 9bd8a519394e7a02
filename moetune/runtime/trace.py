"""Record when each step of a phase ran: the measured timeline of a layer.

The executor of `moe` reports every computation and transfer to a `SpanRecorder`.
"""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, Protocol

import torch

from moetune.comm.transfer import Transfer
from moetune.domain.layer import Phase, Workload
from moetune.domain.operations import Operation, transfer_seconds
from moetune.runtime.stamps import CudaStamp, Stamp, stamp_now

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

    def compute(self, phase: Phase, name: str, chunk: int) -> AbstractContextManager[None]:
        """Record the body as one computation."""

    def exchange(
        self, phase: Phase, name: str, chunk: int, num_bytes: int
    ) -> AbstractContextManager[None]:
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

    def compute(self, *_: object) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    exchange = compute

    def transfer(
        self, phase: Phase, name: str, chunk: int, transfer: Transfer, num_bytes: int  # noqa: ARG002 - not recorded
    ) -> Transfer:  # fmt: skip
        """Return the exchange."""
        return transfer


class _Step:
    """One step under way; the first that sees its end sets it."""

    def __init__(
        self, phase: Phase, name: str, resource: _Resource, chunk: int, num_bytes: int | None
    ) -> None:
        self.phase: Phase = phase
        self.name, self.resource, self.chunk, self.num_bytes = name, resource, chunk, num_bytes
        self.start: Stamp | None = None
        self.end: Stamp | None = None
        self.has_ended = threading.Event()

    def set_end(self, stamp: Stamp) -> None:
        """Set the end, the first time."""
        if self.end is None:
            self.end = stamp
            self.has_ended.set()


class TimelineRecorder:
    """Records with the device's clock: stamps of the host, or events of a GPU's stream.

    A body's stamps are in the current stream. A transfer starts when it is issued or when the one
    before it ends: the wire serves exchanges in order. It ends when it has completed, which takes a
    thread or a stream that nothing else uses, or at the latest when it was waited for.

    Args:
        follows_transfers: False records a transfer's end only where it is waited for: cheaper, and
            right for the end of a phase, which waits for its last transfer at once.
    """

    def __init__(self, device: torch.device, *, follows_transfers: bool = True) -> None:
        self._device, self._follows = device, follows_transfers
        self._zero = stamp_now(device)
        self._steps: list[_Step] = []
        self._behind_transfers: torch.cuda.Stream | None = None
        if follows_transfers and device.type == "cuda":
            self._behind_transfers = torch.cuda.Stream(device)

    def compute(self, phase: Phase, name: str, chunk: int) -> AbstractContextManager[None]:
        """Time the body."""
        return self._body(_Step(phase, name, "comp", chunk, None))

    def exchange(
        self, phase: Phase, name: str, chunk: int, num_bytes: int
    ) -> AbstractContextManager[None]:
        """Time the body; without following transfers nothing, as it is no part of the pipeline."""
        if not self._follows:
            return nullcontext()
        return self._body(_Step(phase, name, "comm", chunk, num_bytes))

    @contextmanager
    def _body(self, step: _Step) -> Iterator[None]:
        step.start = stamp_now(self._device)
        yield
        step.set_end(stamp_now(self._device))
        self._steps.append(step)

    def transfer(
        self, phase: Phase, name: str, chunk: int, transfer: Transfer, num_bytes: int
    ) -> Transfer:
        """Record the time of issue and, when the exchange completes, of its end."""
        step = _Step(phase, name, "comm", chunk, num_bytes)
        self._steps.append(step)
        if self._behind_transfers is not None:
            self._follow(transfer, step, self._behind_transfers)
            return transfer
        step.start = stamp_now(self._device)
        future = transfer.future() if self._follows else None
        if future is not None:
            future.add_done_callback(lambda _: step.set_end(stamp_now(self._device)))
        elif self._follows:
            step.set_end(step.start)
        return _Waited(transfer, step, self._device)

    def _follow(self, transfer: Transfer, step: _Step, stream: torch.cuda.Stream) -> None:
        """Record events around a wait for the exchange, in a stream of their own.

        A transfer's future is complete as soon as NCCL has issued it. The first event is over when
        the transfer before it has ended, and when the computing stream has reached the issue.
        """
        future = transfer.future()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        step.start = CudaStamp(stream)
        if future is not None:
            # Not the transfer's own wait, after which nothing holds its tensors.
            with torch.cuda.stream(stream):
                future.wait()
        step.set_end(CudaStamp(stream))

    def is_over(self) -> bool:
        """Return whether every step has ended, without waiting."""
        return all(step.end is not None and step.end.is_over() for step in self._steps)

    def spans(self) -> tuple[RecordedSpan, ...]:
        """Return all spans in the order of their starts, once the last step has ended."""
        spans, previous_end = [], 0.0
        for step in self._steps:
            step.has_ended.wait(_END_SECONDS)
            assert step.start is not None  # noqa: S101 - set when it was added
            end = (step.end or stamp_now(self._device)).since(self._zero)
            start = step.start.since(self._zero)
            if step.resource == "comm":
                start, previous_end = min(max(start, previous_end), end), max(previous_end, end)
            spans.append(
                RecordedSpan(
                    phase=step.phase, name=step.name, resource=step.resource, chunk=step.chunk,
                    start_seconds=start, end_seconds=end, num_bytes=step.num_bytes,
                )
            )  # fmt: skip
        return tuple(sorted(spans, key=lambda span: span.start_seconds))

    def seconds(self, workload: Workload, operation: Operation) -> float | None:
        """Return the time of one of the call's operations; None where it had none to wait for."""
        steps = [span for span in self.spans() if span.phase == operation.phase]
        experts = [one for one in steps if one.resource == "comp"]
        if not experts:
            return None
        compute_seconds = fmean(one.end_seconds - one.start_seconds for one in experts)
        if operation.name == "experts":
            return compute_seconds
        phase_seconds = max(one.end_seconds for one in steps) - steps[0].start_seconds
        seconds = transfer_seconds(
            workload, degree=operation.degree, phase_seconds=phase_seconds,
            compute_seconds=compute_seconds,
        )  # fmt: skip
        return seconds if seconds > 0 else None


class _Waited:
    """A transfer whose end is recorded, at the latest, when it was waited for."""

    __slots__ = ("_device", "_step", "_transfer")

    def __init__(self, transfer: Transfer, step: _Step, device: torch.device) -> None:
        self._transfer, self._step, self._device = transfer, step, device

    def wait(self) -> None:
        self._transfer.wait()
        self._step.set_end(stamp_now(self._device))

    def future(self) -> torch.futures.Future[object] | None:
        return self._transfer.future()
