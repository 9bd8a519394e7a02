"""Record how long a watched call's phases and their experts took, at the cost of a few stamps.

Unlike `trace.HostRecorder` it follows no transfer to its end, which takes a thread or a callback:
a phase ends when its last transfer was waited for. On a GPU stamps are events of the stream.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from types import TracebackType
from typing import Protocol

import torch

from moetune.comm.transfer import Transfer
from moetune.domain.layer import PHASES, Phase, Workload
from moetune.domain.operations import Operation, transfer_seconds


class Stamp(Protocol):
    """A point in time."""

    def is_over(self) -> bool:
        """Return whether it has passed."""

    def since(self, earlier: "Stamp") -> float:
        """Return the seconds from an earlier stamp of the same kind."""


class _HostStamp:
    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def is_over(self) -> bool:
        return True

    def since(self, earlier: Stamp) -> float:
        assert isinstance(earlier, _HostStamp)  # noqa: S101 - stamps of one recorder
        return self.seconds - earlier.seconds


class _CudaStamp:
    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(torch.cuda.current_stream(device))

    def is_over(self) -> bool:
        return bool(self.event.query())

    def since(self, earlier: Stamp) -> float:
        assert isinstance(earlier, _CudaStamp)  # noqa: S101 - stamps of one recorder
        return float(earlier.event.elapsed_time(self.event)) / 1e3


@dataclass(slots=True)
class _PhaseStamps:
    """The stamps of one phase: its begin, its last, and the experts of each chunk."""

    first: Stamp | None = None
    last: Stamp | None = None
    experts: list[tuple[Stamp, Stamp]] = field(default_factory=list)


class PhaseRecorder:
    """A recorder of one call, see `trace.SpanRecorder`."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._stamp: Callable[[], Stamp] = partial(_CudaStamp, device) if is_cuda else _HostStamp
        self._phases: dict[Phase, _PhaseStamps] = {phase: _PhaseStamps() for phase in PHASES}

    def compute(self, phase: Phase, name: str, chunk: int) -> AbstractContextManager[None]:  # noqa: ARG002 - the protocol's
        """Stamp the body's begin and end."""
        return _Computation(self, phase)

    def exchange(self, *_: object) -> AbstractContextManager[None]:
        """Stamp nothing: what precedes the first chunk is no part of the pipeline."""
        return nullcontext()

    def transfer(
        self, phase: Phase, name: str, chunk: int, transfer: Transfer, num_bytes: int  # noqa: ARG002 - the protocol's
    ) -> Transfer:  # fmt: skip
        """Stamp the phase's begin, and return a transfer that stamps when it was waited for."""
        self.begin(phase)
        return _StampedTransfer(self, phase, transfer)

    def begin(self, phase: Phase) -> Stamp:
        """Stamp a step's begin."""
        stamp, stamps = self._stamp(), self._phases[phase]
        stamps.first = stamps.first or stamp
        return stamp

    def end(self, phase: Phase) -> Stamp:
        """Stamp a step's end."""
        stamp = self._phases[phase].last = self._stamp()
        return stamp

    def add_experts(self, phase: Phase, begin: Stamp, end: Stamp) -> None:
        """Add one chunk's experts."""
        self._phases[phase].experts.append((begin, end))

    def is_over(self) -> bool:
        """Return whether every stamp has passed."""
        return all(one.last is None or one.last.is_over() for one in self._phases.values())

    def seconds(self, workload: Workload, operation: Operation) -> float | None:
        """Return the time of one of the call's operations; None where it had none to wait for."""
        stamps = self._phases[operation.phase]
        if not stamps.experts or stamps.first is None or stamps.last is None:
            return None
        compute_seconds = fmean(end.since(begin) for begin, end in stamps.experts)
        if operation.name == "experts":
            return compute_seconds
        seconds = transfer_seconds(
            workload, degree=operation.degree, phase_seconds=stamps.last.since(stamps.first),
            compute_seconds=compute_seconds,
        )  # fmt: skip
        return seconds if seconds > 0 else None


class _Computation:
    __slots__ = ("_begin", "_phase", "_recorder")

    def __init__(self, recorder: PhaseRecorder, phase: Phase) -> None:
        self._recorder, self._phase = recorder, phase

    def __enter__(self) -> None:
        self._begin = self._recorder.begin(self._phase)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end = self._recorder.end(self._phase)
        self._recorder.add_experts(self._phase, self._begin, end)


class _StampedTransfer:
    __slots__ = ("_inner", "_phase", "_recorder")

    def __init__(self, recorder: PhaseRecorder, phase: Phase, inner: Transfer) -> None:
        self._recorder, self._phase, self._inner = recorder, phase, inner

    def wait(self) -> None:
        self._inner.wait()
        self._recorder.end(self._phase)

    def future(self) -> torch.futures.Future[object] | None:
        return self._inner.future()
