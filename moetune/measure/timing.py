"""A visit of a point: blocks of runs, timed on all ranks together until their times settle.

`session` calls `measure` for every visit of a point. Every rank runs the same blocks at the same
time, as in training, even without communication. A block's time is the largest of all ranks. All
ranks then have the same times and take the same decisions, and no rank waits for another.

The blocks of collectives follow each other without a pause, after an untimed lead-in. Links may
transfer the first bytes after a pause faster than their sustained rate, and a phase's chunks occupy
a link for longer than that.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from moetune.comm.agree import first_text, largest
from moetune.domain.errors import MoetuneError
from moetune.domain.samples import USABLE_SPREAD
from moetune.measure.background import Background
from moetune.measure.device import Device
from moetune.measure.operations import Experiment
from moetune.measure.ranks import MeasuringRanks

_MIN_QUARTILE_BLOCKS = 4
_FEWEST_BLOCKS = 3
_WARM_DIFFERENCE = 0.01
_SETTLED_SPREAD = 0.05
_MAX_GROWTH = 100
# A stream's first exchanges are faster than later exchanges, and do not show how many fill a block.
_MAX_STREAM_GROWTH = 4
OVERLAPPED_SECONDS = 0.6
# A pause between turns would not show within only one or two turns.
TURNS_IN_WINDOW = 3
STREAM_BLOCK_SECONDS = 0.05
_CLOCK_SECONDS = 1e-9
# A factor of the time that an earlier block took to issue: the next block may take longer.
_HEAD_START = 1.3
NUM_STREAM_BLOCKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The limits of a point's measurement.

    Args:
        min_blocks: number of blocks after which a small spread may end the measurement.
        max_seconds: time limit of all blocks; at least three are run.
        warmup_seconds: time limit of the warm-up.
        block_seconds: shortest time of a block, far above the clock's resolution.
    """

    min_blocks: int
    max_blocks: int
    max_seconds: float
    warmup_seconds: float
    block_seconds: float = 1e-3

    def for_experiment(self, experiment: Experiment) -> "Effort":
        """Return the effort with at least the block length and time that the experiment needs."""
        shortest = STREAM_BLOCK_SECONDS if experiment.is_stream else 0.0
        effort = replace(self, block_seconds=max(self.block_seconds, shortest))
        if not experiment.background_loads:
            return effort
        return replace(effort, max_seconds=max(self.max_seconds, OVERLAPPED_SECONDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The raw times of single operations, one per block."""

    seconds: tuple[float, ...]
    num_iterations: int

    @property
    def is_unstable(self) -> bool:
        """Whether the blocks, too few for quartiles, differ by more than quartiles may."""
        width = max(self.seconds) - min(self.seconds)
        few = len(self.seconds) < _MIN_QUARTILE_BLOCKS
        return few and width / statistics.median(self.seconds) > USABLE_SPREAD


class FailedPointError(MoetuneError):
    """An error for a point that cannot be measured here; other points may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedBlock:
    """A timed block, equal on all ranks.

    Args:
        seconds: time of a run.
        counts: whether all background loads provably ran through the block.
        turn_seconds: time of the slowest background load's turn; 0 without loads.
        elapsed_seconds: time since the stopwatch was started.
    """

    seconds: float
    counts: bool
    turn_seconds: float
    elapsed_seconds: float


class Stopwatch:
    """A stopwatch for the blocks of an experiment on all ranks."""

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
        """Run and time a block.

        Raises:
            FailedPointError: it failed on a rank; raised on all of them.
        """

        def work() -> list[tuple[float, bool, float]]:
            opened = time.perf_counter()
            seconds = self._seconds(iterations)
            counts = self._background.ran_through((opened, time.perf_counter()))
            return [(seconds, counts, self._background.slowest_turn_seconds())]

        (block,) = self._agreed(work, iterations, 1, "a block")
        return block

    def stream(self, iterations: int) -> list[TimedBlock]:
        """Run blocks without a pause between them, and time all except the first, the lead-in.

        Raises:
            FailedPointError: it failed on a rank; raised on all of them.
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
        """Return the blocks that all ranks ran together, each with the slowest rank's time.

        Args:
            work: returns each block's seconds, whether it counts, and the background's turn time.
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

        Ranks leave the barrier at different moments. With several ranks the operation therefore
        runs once before the clock starts.
        """
        shared = self._control.num_ranks > 1
        return self._device.seconds(
            lambda: self._repeat(iterations),
            lead_in=self._experiment.victim.run if shared else None,
            head_start_seconds=self._head_start_seconds(iterations),
        )

    def _head_start_seconds(self, iterations: int) -> float:
        """Return how long the host needs to issue a block; 0 if that is unknown.

        It is also 0 with background loads: the device never idles, so issued work waits anyway.
        """
        experiment = self._experiment
        if experiment.is_issued or experiment.background_loads or self._issue_seconds == math.inf:
            return 0.0
        return _HEAD_START * iterations * self._issue_seconds

    def _marked(self, iterations: int) -> Callable[[], float]:
        self._repeat(iterations)
        return self._device.mark()

    def _repeat(self, iterations: int) -> None:
        began = time.perf_counter()
        for _ in range(iterations):
            self._experiment.victim.run()
            if self._experiment.victim.is_serial:
                self._device.synchronize()
        mean_seconds = (time.perf_counter() - began) / iterations
        self._issue_seconds = min(self._issue_seconds, mean_seconds)


def explain(error: BaseException) -> str:
    """Return the error as one line for `Sample.error`."""
    text = str(error)
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate" in text:
        return "out of memory"
    return text.splitlines()[0] if text else type(error).__name__


def measure(
    experiment: Experiment, *, device: Device, ranks: MeasuringRanks, effort: Effort
) -> Timing:
    """Time the experiment's victim while its background loads run.

    Raises:
        FailedPointError: the point failed on a rank, or the background loads paused too often.
    """
    effort = effort.for_experiment(experiment)
    device.synchronize()
    ranks.control.barrier("a point")
    with (
        device.use(),  # first, as a busy device may keep a new stream from ever starting
        Background(experiment.background_loads, device=device, ranks=ranks) as background,
    ):
        watch = Stopwatch(experiment, background, device, ranks)
        growth = _MAX_STREAM_GROWTH if experiment.is_stream else _MAX_GROWTH
        iterations = _warm_up(watch, effort, max_growth=growth)
        blocks = _blocks(watch, iterations, effort, is_stream=experiment.is_stream)
    at_once = experiment.victim.at_once
    return Timing(
        seconds=tuple(seconds / at_once for seconds in blocks), num_iterations=iterations * at_once
    )


def _warm_up(watch: Stopwatch, effort: Effort, *, max_growth: int) -> int:
    """Run until two blocks in a row differ by less than 1 %; return the operations in a block."""
    iterations, before = 1, math.inf
    watch.block(iterations)
    while True:
        block = watch.block(iterations)
        shortest = max(effort.block_seconds, TURNS_IN_WINDOW * block.turn_seconds)
        late = block.elapsed_seconds > effort.warmup_seconds
        if block.seconds * iterations < shortest:
            growth = math.ceil(shortest / (block.seconds * iterations) * 1.1)
            iterations, before = iterations * min(growth, max_growth), math.inf
        elif late or abs(block.seconds / before - 1) < _WARM_DIFFERENCE:
            return iterations
        else:
            before = block.seconds


def _blocks(watch: Stopwatch, iterations: int, effort: Effort, *, is_stream: bool) -> list[float]:
    """Return the times of the blocks that count, from a single stream or until they settle."""
    seconds: list[float] = []
    rejected = 0
    watch.restart()
    while True:
        blocks = watch.stream(iterations) if is_stream else [watch.block(iterations)]
        seconds += [block.seconds for block in blocks if block.counts]
        rejected += sum(not block.counts for block in blocks)
        late = blocks[-1].elapsed_seconds > effort.max_seconds
        counted = len(seconds)
        settled = counted >= effort.min_blocks and _spread(seconds) < _SETTLED_SPREAD
        enough = is_stream or late or settled or counted >= effort.max_blocks
        if counted >= _FEWEST_BLOCKS and enough:
            return seconds
        if late and rejected > counted + effort.min_blocks:
            raise FailedPointError(
                f"the background operations ran through only {counted} of "
                f"{counted + rejected} blocks"
            )


def _spread(seconds: list[float]) -> float:
    if len(seconds) < _MIN_QUARTILE_BLOCKS:
        return math.inf
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / middle
