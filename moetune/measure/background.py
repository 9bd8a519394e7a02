"""Background loads: operations that run during a measurement, and the proof that they ran.

`timing` starts them around an experiment's blocks, and counts a block only with that proof.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

from moetune.comm.agree import vote
from moetune.domain.errors import MoetuneError
from moetune.measure.device import Device
from moetune.measure.operations import TimedOperation
from moetune.measure.ranks import MeasuringRanks

MIN_OVERLAP = 0.95
_START_TURNS = 2
_TURN_SECONDS = 2e-3
# A `is_serial` load leaves the engine between turns; a run as long as a copy is a whole turn.
_SERIAL_TURN_SECONDS = 1e-3
_PATIENCE_SECONDS = 30.0
_LONGEST_BLOCK_SECONDS = 10.0

Window = tuple[float, float]
"""The start and the end on `time.perf_counter`."""


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
    """Return whether the intervals prove that an operation ran through the whole window.

    It must complete a turn inside the window and another after it, and run for 95 % of it.
    """
    start, end = window
    inside = any(start < done <= end for _, done in busy)
    beyond = any(done > end for _, done in busy)
    return inside and beyond and overlap(window, busy) >= MIN_OVERLAP


class BackgroundLoad(threading.Thread):
    """A thread that runs an operation in turns; each turn is issued before the previous turn ends.

    The thread ends by itself if a block takes far too long: the measured operation may wait for it.

    Args:
        vote: starts a vote on stopping with this rank's wish, and returns a function that waits for
            the outcome. Ranks that run a collective must stop after the same turn.
    """

    def __init__(
        self, operation: TimedOperation, device: Device, vote: Callable[[bool], Callable[[], bool]]
    ) -> None:
        super().__init__(daemon=True)
        self._operation, self._device, self._vote = operation, device, vote
        self._stopping = threading.Event()
        self._deadline = time.perf_counter() + _LONGEST_BLOCK_SECONDS
        self._changed = threading.Condition()
        self._busy: list[Window] = []
        self._failure: Exception | None = None
        self._ended = False

    def run(self) -> None:
        """Run the operation until the thread is stopped."""
        try:
            with self._device.use():
                self._loop()
                self._device.synchronize()
        except Exception as error:  # noqa: BLE001 - handed to the thread that measures
            self._failure = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _loop(self) -> None:
        issued: list[tuple[float, Callable[[], float]]] = []
        runs = self._runs_in_turn()
        stopped = False
        while not stopped:
            outcome = self._vote(self._stopping.is_set() or time.perf_counter() > self._deadline)
            issued.append((time.perf_counter(), self._issue(runs)))
            if len(issued) > 1 or self._operation.is_serial:
                start, done = issued.pop(0)
                end = done()
                with self._changed:
                    self._busy.append((start, end))
                    self._changed.notify_all()
            stopped = outcome()
        for _, done in issued:
            done()

    def _runs_in_turn(self) -> int:
        """Return the number of runs in a turn that makes the pause after a turn negligible."""
        if self._operation.ranks_meet:
            return 1
        start = time.perf_counter()
        self._operation.run()
        seconds = self._device.mark()() - start
        wanted = _SERIAL_TURN_SECONDS if self._operation.is_serial else _TURN_SECONDS
        return max(math.ceil(wanted / max(seconds, 1e-9)), 1)

    def _issue(self, runs: int) -> Callable[[], float]:
        """Start a turn, and return a function that waits for its end and returns the time."""
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
        """Request the end; return at once."""
        self._stopping.set()

    def expect_end_by(self, moment: float) -> None:
        """Let the thread end at that moment, on `perf_counter`, unless a later call changes it."""
        self._deadline = moment

    def has_run(self, turns: int) -> bool:
        """Wait for that number of completed turns; return False if the thread ended before."""
        return self._wait(lambda: len(self._busy) >= turns)

    def has_passed(self, moment: float) -> bool:
        """Wait for a turn that completes after `moment`; return False if the thread ended first."""
        return self._wait(lambda: bool(self._busy) and self._busy[-1][1] > moment)

    def _wait(self, condition: Callable[[], bool]) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._ended, _PATIENCE_SECONDS)
            return condition()

    def busy(self) -> tuple[Window, ...]:
        """Return the intervals during which the operation ran, one per turn.

        Raises:
            MoetuneError: the operation failed.
        """
        if self._failure is not None:
            raise MoetuneError(f"a background operation failed: {self._failure}")
        with self._changed:
            return tuple(self._busy)


class Background:
    """The background loads of an experiment, which run within this context."""

    def __init__(
        self, operations: Sequence[TimedOperation], *, device: Device, ranks: MeasuringRanks
    ) -> None:
        ballot = partial(vote, ranks.votes, name="the end of a background load")
        self._loads = tuple(
            BackgroundLoad(operation, device, ballot if operation.ranks_meet else _wish_alone)
            for operation in operations
        )

    def __enter__(self) -> Self:
        for load in self._loads:
            load.start()
        for load in self._loads:
            load.has_run(_START_TURNS)
        return self

    def __exit__(self, *_: object) -> None:
        for load in self._loads:
            load.stop()
        for load in self._loads:
            load.join(_PATIENCE_SECONDS)

    def begin_block(self) -> None:
        """Let the loads run for the time of a block, up to a limit in case the block never ends."""
        for load in self._loads:
            load.expect_end_by(time.perf_counter() + _LONGEST_BLOCK_SECONDS)

    def ran_through(self, window: Window) -> bool:
        """Return whether every background load provably ran through the whole window.

        Raises:
            MoetuneError: a load failed.
        """
        return all(
            load.has_passed(window[1]) and proves(window, load.busy()) for load in self._loads
        )

    def slowest_turn_seconds(self) -> float:
        """Return the time of the slowest load's last turn; 0 without loads."""
        spans = [load.busy()[-1:] for load in self._loads]
        return max((end - start for span in spans for start, end in span), default=0.0)


def _wish_alone(stop: bool) -> Callable[[], bool]:  # noqa: FBT001 - the signature of a vote
    return lambda: stop
