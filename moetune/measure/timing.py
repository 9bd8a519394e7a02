"""The measuring protocol: warm up until stable, then blocks whose raw times are kept.

Every rank runs the same blocks at the same time, also of operations without communication, as
in training. A block's time is the largest of all ranks, so that every rank sees the same
numbers and takes the same decisions, and none is left waiting.
"""

import math
import statistics
import time
from dataclasses import dataclass, replace

from moetune.comm.agree import first_text, largest
from moetune.domain.errors import MoetuneError
from moetune.domain.samples import USABLE_SPREAD, CollectivePoint, Point
from moetune.measure.background import Background
from moetune.measure.device import Device
from moetune.measure.operations import Experiment
from moetune.measure.ranks import MeasuringRanks

_MIN_QUARTILE_BLOCKS = 4
_FEWEST_BLOCKS = 3
_WARM_DIFFERENCE = 0.01
_SETTLED_SPREAD = 0.05
_MAX_GROWTH = 100
_CLOCK_SECONDS = 1e-9
OVERLAPPED_SECONDS = 0.6
QUEUE_SECONDS = 0.05
SHARED_SECONDS = 0.02
# A window must hold several turns of each background_load to show that none paused.
_TURNS_IN_WINDOW = 3


class FailedPointError(MoetuneError):
    """This point cannot be measured here; the others can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much time one point is worth.

    Args:
        min_blocks: blocks before a small spread is believed.
        max_seconds: time cap of all blocks; at least three are run.
        warmup_seconds: time cap of the warm-up.
        block_seconds: shortest block, far above what the clock resolves.
    """

    min_blocks: int
    max_blocks: int
    max_seconds: float
    warmup_seconds: float
    block_seconds: float = 1e-3

    def for_point(self, point: Point) -> "Effort":
        """Return the effort with blocks in which a queue of exchanges outlasts any burst.

        Links, sockets and switches take the first few hundred kilobytes faster than they can
        go on; the chunks of a phase keep a link busy for longer.
        """
        if isinstance(point, CollectivePoint) and point.in_flight > 1:
            return replace(self, block_seconds=max(self.block_seconds, QUEUE_SECONDS))
        return self

    def for_sharers(self, num_sharers: int) -> "Effort":
        """Return the effort with blocks of many turns where several ranks share a core.

        In a shorter block a rank has the core to itself, or not at all, by chance.
        """
        if num_sharers == 1:
            return self
        return replace(self, block_seconds=max(self.block_seconds, SHARED_SECONDS))

    def for_experiment(self, experiment: Experiment) -> "Effort":
        """Return the effort with the time that the long windows beside background_loads need."""
        if not experiment.background_loads:
            return self
        return replace(self, max_seconds=max(self.max_seconds, OVERLAPPED_SECONDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Raw times of single operations, one for each block."""

    seconds: tuple[float, ...]
    num_iterations: int

    @property
    def is_unstable(self) -> bool:
        """Whether too few blocks for quartiles differ by more than quartiles may."""
        width = max(self.seconds) - min(self.seconds)
        few = len(self.seconds) < _MIN_QUARTILE_BLOCKS
        return few and width / statistics.median(self.seconds) > USABLE_SPREAD


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """One block, agreed.

    Args:
        seconds: time of one run.
        counts: whether all background_loads provably ran.
        turn_seconds: the slowest background_load's turn, 0 without any.
        elapsed_seconds: since the stopwatch was started.
    """

    seconds: float
    counts: bool
    turn_seconds: float
    elapsed_seconds: float


class _Stopwatch:
    """Times blocks of one experiment on all ranks."""

    def __init__(
        self, experiment: Experiment, background: Background, device: Device, ranks: MeasuringRanks
    ) -> None:
        self._experiment, self._background = experiment, background
        self._device, self._control = device, ranks.control
        self._start = time.perf_counter()

    def restart(self) -> None:
        """Count the elapsed time from now on."""
        self._start = time.perf_counter()

    def block(self, iterations: int) -> _Block:
        """Run and time one block.

        Raises:
            FailedPointError: it failed on a rank; raised on all of them.
            CollectiveError: a rank is gone.
        """
        text, seconds, counts, turn = "", 0.0, False, 0.0
        self._device.flush()
        self._control.barrier("a block")
        opened = time.perf_counter()
        try:
            seconds = self._device.seconds(lambda: self._repeat(iterations))
            counts = self._background.ran_through((opened, time.perf_counter()))
            turn = self._background.slowest_turn_seconds()
        except (RuntimeError, MemoryError, MoetuneError) as error:
            text = explain(error)
        elapsed = time.perf_counter() - self._start
        slowest, uncounted, failed, turn, elapsed = largest(
            self._control,
            (seconds / iterations, not counts, bool(text), turn, elapsed),
            "the times of a block",
        )
        if failed:
            raise FailedPointError(first_text(self._control, text, "the failure of a block"))
        return _Block(
            seconds=max(slowest, _CLOCK_SECONDS),
            counts=not uncounted,
            turn_seconds=turn,
            elapsed_seconds=elapsed,
        )

    def _repeat(self, iterations: int) -> None:
        for _ in range(iterations):
            self._experiment.victim.run()


def measure(
    experiment: Experiment, *, device: Device, ranks: MeasuringRanks, effort: Effort
) -> Timing:
    """Time the experiment's victim while its background_loads run.

    Raises:
        FailedPointError: it failed on a rank, or the background_loads did not keep running.
        CollectiveError: a rank is gone.
    """
    effort = effort.for_experiment(experiment)
    device.synchronize()
    ranks.control.barrier("a point")
    with (
        Background(experiment.background_loads, device=device, ranks=ranks) as background,
        device.use(),
    ):
        watch = _Stopwatch(experiment, background, device, ranks)
        iterations = _warm_up(watch, effort)
        blocks = _blocks(watch, iterations, effort)
    at_once = experiment.victim.at_once
    return Timing(
        seconds=tuple(seconds / at_once for seconds in blocks),
        num_iterations=iterations * at_once,
    )


def _warm_up(watch: _Stopwatch, effort: Effort) -> int:
    """Run until two blocks in a row differ by less than 1 %; return the operations in a block."""
    iterations, before = 1, math.inf
    watch.block(iterations)
    while True:
        block = watch.block(iterations)
        shortest = max(effort.block_seconds, _TURNS_IN_WINDOW * block.turn_seconds)
        late = block.elapsed_seconds > effort.warmup_seconds
        if block.seconds * iterations < shortest:
            growth = math.ceil(shortest / (block.seconds * iterations) * 1.1)
            iterations, before = iterations * min(growth, _MAX_GROWTH), math.inf
        elif late or abs(block.seconds / before - 1) < _WARM_DIFFERENCE:
            return iterations
        else:
            before = block.seconds


def _blocks(watch: _Stopwatch, iterations: int, effort: Effort) -> list[float]:
    kept: list[float] = []
    rejected = 0
    watch.restart()
    while True:
        block = watch.block(iterations)
        if block.counts:
            kept.append(block.seconds)
        else:
            rejected += 1
        late = block.elapsed_seconds > effort.max_seconds
        settled = len(kept) >= effort.min_blocks and _spread(kept) < _SETTLED_SPREAD
        if len(kept) >= _FEWEST_BLOCKS and (late or settled or len(kept) >= effort.max_blocks):
            return kept
        if late and rejected > len(kept) + effort.min_blocks:
            raise FailedPointError(
                f"the operations beside it ran through only {len(kept)} of "
                f"{len(kept) + rejected} blocks"
            )


def _spread(seconds: list[float]) -> float:
    if len(seconds) < _MIN_QUARTILE_BLOCKS:
        return math.inf
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / middle


def explain(error: BaseException) -> str:
    """Return one line for a sample's `error`."""
    text = str(error)
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate" in text:
        return "out of memory"
    return text.splitlines()[0] if text else type(error).__name__
