"""When each step of a real phase ran: the measured side of a timeline."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from moetune.runtime.links import Transfer

Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSpan:
    """One step; times in seconds since the recorder was made."""

    phase: Phase
    name: str
    resource: Literal["comp", "comm"]
    chunk: int
    start_seconds: float
    end_seconds: float


class Recorder(Protocol):
    """Watches the steps of a phase."""

    def compute(
        self, phase: Phase, name: str, chunk: int
    ) -> contextlib.AbstractContextManager[None]:
        """Watch the body as one computation."""
        ...

    def transfer(self, phase: Phase, name: str, chunk: int, transfer: Transfer) -> None:
        """Watch an exchange that has just been issued."""
        ...


class NoRecorder:
    """Watches nothing."""

    def compute(self, *_: object) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def transfer(self, *_: object) -> None:
        """Do nothing."""


class HostRecorder:
    """Reads the host's clock: right on a CPU, where computing blocks the caller.

    The end of an exchange is read in its own thread as it completes; its start is its issue
    or the end of the one before it, because a link serves exchanges in order.
    """

    def __init__(self) -> None:
        self._zero = time.perf_counter()
        self._computed: list[RecordedSpan] = []
        self._issued: list[tuple[Phase, str, int, float, list[float]]] = []

    @contextlib.contextmanager
    def compute(self, phase: Phase, name: str, chunk: int) -> Iterator[None]:
        """Time the body."""
        start = self._now()
        yield
        self._computed.append(
            RecordedSpan(
                phase=phase, name=name, resource="comp", chunk=chunk,
                start_seconds=start, end_seconds=self._now(),
            )
        )  # fmt: skip

    def transfer(self, phase: Phase, name: str, chunk: int, transfer: Transfer) -> None:
        """Note the issue and, when it completes, the end."""
        ends: list[float] = []
        self._issued.append((phase, name, chunk, self._now(), ends))
        future = transfer.future()
        if future is None:
            ends.append(self._now())
        else:
            future.add_done_callback(lambda _: ends.append(self._now()))

    def spans(self) -> tuple[RecordedSpan, ...]:
        """Return all finished spans in the order of their starts."""
        spans, previous_end = list(self._computed), 0.0
        for phase, name, chunk, issued, ends in self._issued:
            if not ends:
                continue
            start = min(max(issued, previous_end), ends[0])
            previous_end = max(previous_end, ends[0])
            spans.append(
                RecordedSpan(
                    phase=phase, name=name, resource="comm", chunk=chunk,
                    start_seconds=start, end_seconds=ends[0],
                )
            )  # fmt: skip
        return tuple(sorted(spans, key=lambda span: span.start_seconds))

    def _now(self) -> float:
        return time.perf_counter() - self._zero
