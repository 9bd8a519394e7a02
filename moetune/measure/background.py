"""Background load: operations that run while another is measured, and the proof that they did."""

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from moetune.comm.agree import vote
from moetune.domain.errors import MoetuneError
from moetune.measure.device import Device
from moetune.measure.operations import Operation
from moetune.measure.ranks import MeasuringRanks

MIN_OVERLAP = 0.95
_START_TURNS = 2
_TURN_SECONDS = 2e-3
_PATIENCE_SECONDS = 30.0

Window = tuple[float, float]
"""Start and end on `time.perf_counter`."""


def overlap(window: Window, busy: Sequence[Window]) -> float:
    """Return the share of the window that the union of the busy intervals covers."""
    start, end = window
    covered, reached = 0.0, start
    for low, high in sorted(busy):
        low, high = max(low, reached), min(high, end)  # noqa: PLW2901 - clipped
        if high > low:
            covered += high - low
            reached = high
    return covered / (end - start)


def proves(window: Window, busy: Sequence[Window]) -> bool:
    """Whether the intervals show an operation that never paused during the window.

    It completed work inside the window and beyond it, and was under way for 95 % of it.
    """
    start, end = window
    inside = any(start < done <= end for _, done in busy)
    beyond = any(done > end for _, done in busy)
    return inside and beyond and overlap(window, busy) >= MIN_OVERLAP


class BackgroundLoad(threading.Thread):
    """Runs one operation again and again, the next issued before the last is done.

    Args:
        vote: given this rank's wish to stop, starts a vote and returns how to wait for its
            outcome; ranks that meet in the operation must stop after the same one.
    """

    def __init__(
        self, operation: Operation, device: Device, vote: Callable[[bool], Callable[[], bool]]
    ) -> None:
        super().__init__(daemon=True)
        self._operation, self._device, self._vote = operation, device, vote
        self._stopping = threading.Event()
        self._news = threading.Condition()
        self._busy: list[Window] = []
        self._failure: Exception | None = None
        self._ended = False

    def run(self) -> None:
        """Run the operation until stopped."""
        try:
            with self._device.use():
                self._loop()
                self._device.synchronize()
        except Exception as error:  # noqa: BLE001 - handed to the thread that measures
            self._failure = error
        with self._news:
            self._ended = True
            self._news.notify_all()

    def _loop(self) -> None:
        issued: list[tuple[float, Callable[[], float]]] = []
        runs = self._runs_in_turn()
        stopped = False
        while not stopped:
            outcome = self._vote(self._stopping.is_set())
            issued.append((time.perf_counter(), self._issue(runs)))
            if len(issued) > 1:
                start, done = issued.pop(0)
                end = done()
                with self._news:
                    self._busy.append((start, end))
                    self._news.notify_all()
            stopped = outcome()
        for _, done in issued:
            done()

    def _runs_in_turn(self) -> int:
        """Return how many runs make a turn so long that the pause after it does not count."""
        if self._operation.ranks_meet:
            return 1
        start = time.perf_counter()
        self._operation.run()
        seconds = self._device.mark()() - start
        return max(math.ceil(_TURN_SECONDS / max(seconds, 1e-9)), 1)

    def _issue(self, runs: int) -> Callable[[], float]:
        """Start a turn and return the function that waits for it and says when it was done."""
        if self._operation.ranks_meet:
            finish = self._operation.issue()

            def done() -> float:
                finish()
                return self._device.mark()()

            return done
        for _ in range(runs):
            self._operation.run()
        return self._device.mark()

    def stop(self) -> None:
        """Ask it to stop."""
        self._stopping.set()

    def has_run(self, turns: int) -> bool:
        """Wait for so many completed turns; False where it stopped before."""
        return self._wait(lambda: len(self._busy) >= turns)

    def has_passed(self, moment: float) -> bool:
        """Wait for a turn that completed after `moment`; False where it stopped before."""
        return self._wait(lambda: bool(self._busy) and self._busy[-1][1] > moment)

    def _wait(self, condition: Callable[[], bool]) -> bool:
        with self._news:
            self._news.wait_for(lambda: condition() or self._ended, _PATIENCE_SECONDS)
            return condition()

    def busy(self) -> tuple[Window, ...]:
        """Return when it was under way, one interval a turn.

        Raises:
            MoetuneError: the operation failed.
        """
        if self._failure is not None:
            raise MoetuneError(f"an operation beside the measured one failed: {self._failure}")
        with self._news:
            return tuple(self._busy)


class Background:
    """The background_loads of one measurement; entering starts them, leaving stops them."""

    def __init__(
        self, operations: Sequence[Operation], *, device: Device, ranks: MeasuringRanks
    ) -> None:
        ballot = partial(vote, ranks.votes, name="the end of a background load")
        self._loads = tuple(
            BackgroundLoad(operation, device, ballot if operation.ranks_meet else _own_wish)
            for operation in operations
        )

    def __enter__(self) -> Self:
        for background_load in self._loads:
            background_load.start()
        for background_load in self._loads:
            background_load.has_run(_START_TURNS)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for background_load in self._loads:
            background_load.stop()
        for background_load in self._loads:
            background_load.join(_PATIENCE_SECONDS)

    def ran_through(self, window: Window) -> bool:
        """Whether every background_load provably ran through the whole window.

        Raises:
            MoetuneError: one of them failed.
        """
        return all(
            background_load.has_passed(window[1]) and proves(window, background_load.busy())
            for background_load in self._loads
        )

    def slowest_turn_seconds(self) -> float:
        """Return how long the last turn of the slowest background_load took; 0 without any."""
        spans = [background_load.busy()[-1:] for background_load in self._loads]
        return max((end - start for span in spans for start, end in span), default=0.0)


def _own_wish(stop: bool) -> Callable[[], bool]:  # noqa: FBT001 - the signature of a vote
    return lambda: stop
