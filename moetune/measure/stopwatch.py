"""A stopwatch of one experiment: blocks and streams of its runs, timed on all ranks at once.

A block's time is the largest of all ranks, which then all have the same times. `timing` decides how
many blocks there are.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, pairwise

from moetune.comm.agree import first_text, largest
from moetune.domain.errors import MoetuneError
from moetune.measure.background import Background
from moetune.measure.device import Device
from moetune.measure.operations import Experiment
from moetune.measure.ranks import MeasuringRanks

_CLOCK_SECONDS = 1e-9
# Of the time that issuing a block took before: the next one may take longer.
_HEAD_START = 1.3
_SUSTAINED_RUNS = 20
NUM_STREAM_BLOCKS = 4


class FailedPointError(MoetuneError):
    """This point cannot be measured here; others may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedBlock:
    """One block, equal on all ranks.

    Args:
        seconds: time of one run.
        counts: all background loads provably ran through it.
        turn_seconds: time of the slowest background load's turn, 0 without loads.
        elapsed_seconds: since the stopwatch was started.
    """

    seconds: float
    counts: bool
    turn_seconds: float
    elapsed_seconds: float


class Stopwatch:
    """Times blocks of one experiment on all ranks."""

    def __init__(
        self, experiment: Experiment, background: Background, device: Device, ranks: MeasuringRanks
    ) -> None:
        self._experiment, self._background = experiment, background
        self._device, self._control = device, ranks.control
        self._start = time.perf_counter()
        self._issue_seconds = math.inf

    def restart(self) -> None:
        """Restart the elapsed time."""
        self._start = time.perf_counter()

    def block(self, iterations: int) -> TimedBlock:
        """Run and time one block.

        Raises:
            FailedPointError: it failed on a rank; raised on all of them.
            CollectiveError: a rank is gone.
        """
        self._device.flush()
        self._rest()

        def work() -> list[tuple[float, bool, float]]:
            opened = time.perf_counter()
            seconds = self._seconds(iterations)
            counts = self._background.ran_through((opened, time.perf_counter()))
            return [(seconds, counts, self._background.slowest_turn_seconds())]

        (block,) = self._agreed(work, iterations, 1, "a block")
        return block

    def stream(self, iterations: int) -> list[TimedBlock]:
        """Run blocks without a pause between them, and time all but the first, the lead-in.

        Raises:
            FailedPointError: it failed on a rank; raised on all of them.
            CollectiveError: a rank is gone.
        """

        def work() -> list[tuple[float, bool, float]]:
            marks = [self._marked(iterations) for _ in range(NUM_STREAM_BLOCKS + 1)]
            windows = list(pairwise([done() for done in marks]))
            return [
                (window[1] - window[0], self._background.ran_through(window), 0.0)
                for window in windows
            ]

        return self._agreed(work, iterations, NUM_STREAM_BLOCKS, "a stream")

    def _agreed(
        self,
        work: Callable[[], list[tuple[float, bool, float]]],
        iterations: int,
        num_blocks: int,
        what: str,
    ) -> list[TimedBlock]:
        """Return the blocks that all ranks ran together, each as long as on the slowest.

        Args:
            work: returns each block's seconds, whether it counts, and the background's turn.
        """
        text, mine = "", [(0.0, False, 0.0)] * num_blocks
        self._control.barrier(what)
        self._background.begin_block()
        try:
            mine = work()
        except (RuntimeError, MemoryError, MoetuneError) as error:
            text = explain(error)
        elapsed = time.perf_counter() - self._start
        values = [(seconds / iterations, not counts, turn) for seconds, counts, turn in mine]
        failed, elapsed, *slowest = largest(
            self._control, (bool(text), elapsed, *chain.from_iterable(values)), f"times of {what}"
        )
        if failed:
            raise FailedPointError(first_text(self._control, text, f"the failure of {what}"))
        seconds, uncounted, turns = slowest[::3], slowest[1::3], slowest[2::3]
        return [
            TimedBlock(
                seconds=max(block_seconds, _CLOCK_SECONDS), counts=not is_void, turn_seconds=turn,
                elapsed_seconds=elapsed,
            )
            for block_seconds, is_void, turn in zip(seconds, uncounted, turns, strict=True)
        ]  # fmt: skip

    def _seconds(self, iterations: int) -> float:
        """Return the time of a block's runs.

        What ranks do together is done once before the clock starts: they leave the barrier at
        different moments. After a pause of the link that one run would be what is measured.
        """
        victim = self._experiment.victim
        shared = self._control.num_ranks > 1 and not self._experiment.rest_seconds
        return self._device.seconds(
            lambda: self._repeat(iterations),
            lead_in=victim.run if shared else None,
            head_start_seconds=self._head_start_seconds(iterations),
        )

    def _head_start_seconds(self, iterations: int) -> float:
        """Return how long the host needs to issue a block; 0 where that is not known.

        Beside background loads the device never idles: what is issued waits for them anyway.
        """
        experiment = self._experiment
        if experiment.is_issued or experiment.background_loads or self._issue_seconds == math.inf:
            return 0.0
        return _HEAD_START * iterations * self._issue_seconds

    def _marked(self, iterations: int) -> Callable[[], float]:
        self._repeat(iterations)
        return self._device.mark()

    def _rest(self) -> None:
        """Leave the link alone for a while, and keep the core awake, as computing does."""
        until = time.perf_counter() + self._experiment.rest_seconds
        while time.perf_counter() < until:
            pass

    def _repeat(self, iterations: int) -> None:
        began = time.perf_counter()
        for _ in range(iterations):
            self._experiment.victim.run()
            if self._experiment.victim.one_by_one:
                self._device.synchronize()
        mean_seconds = (time.perf_counter() - began) / iterations
        self._issue_seconds = min(self._issue_seconds, mean_seconds)

    def sustain(self) -> None:
        """Run the victim for as long as the experiment wants, as training does without end."""
        until = time.perf_counter() + self._experiment.sustained_seconds
        while time.perf_counter() < until:
            for _ in range(_SUSTAINED_RUNS):
                self._experiment.victim.run()
            self._device.synchronize()


def explain(error: BaseException) -> str:
    """Return one line for `Sample.error`."""
    text = str(error)
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate" in text:
        return "out of memory"
    return text.splitlines()[0] if text else type(error).__name__
