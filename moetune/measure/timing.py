"""The measuring protocol of one visit: warm up until times are stable, then time blocks.

`session` calls `measure` for every visit of a point. Every rank runs the same blocks at the same
time, as in training, even those of operations without communication. A block's time is the largest
of all ranks: all then have the same times and take the same decisions, and none waits for another.

The blocks of collectives follow each other without a pause, after a lead-in that is not timed:
links may pass the first bytes after a pause faster than their rate, and the chunks of a phase
occupy them for longer than that.
"""

import math
import statistics
from dataclasses import dataclass, replace

from moetune.domain.samples import USABLE_SPREAD
from moetune.measure.background import Background
from moetune.measure.device import Device
from moetune.measure.operations import Experiment
from moetune.measure.ranks import MeasuringRanks
from moetune.measure.stopwatch import FailedPointError, Stopwatch

_MIN_QUARTILE_BLOCKS = 4
_FEWEST_BLOCKS = 3
_WARM_DIFFERENCE = 0.01
_SETTLED_SPREAD = 0.05
_MAX_GROWTH = 100
# The first exchanges of a stream are faster than later ones: no guide to how many fill a block.
_MAX_STREAM_GROWTH = 4
OVERLAPPED_SECONDS = 0.6
SHARED_SECONDS = 0.02
# Within one or two turns a pause between turns would not show.
TURNS_IN_WINDOW = 3
STREAM_BLOCK_SECONDS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Limits of one point's measurement.

    Args:
        min_blocks: blocks before a small spread may end the measurement.
        max_seconds: time limit of all blocks; at least three are run.
        warmup_seconds: time limit of the warm-up.
        block_seconds: shortest block, far above the clock's resolution.
    """

    min_blocks: int
    max_blocks: int
    max_seconds: float
    warmup_seconds: float
    block_seconds: float = 1e-3

    def for_sharers(self, num_sharers: int) -> "Effort":
        """Return the effort with blocks of many time slices if several ranks share a core.

        In a shorter block a rank has the core to itself, or not at all, by chance.
        """
        if num_sharers == 1:
            return self
        return replace(self, block_seconds=max(self.block_seconds, SHARED_SECONDS))

    def for_experiment(self, experiment: Experiment) -> "Effort":
        """Return the effort with the blocks and the time that the experiment needs at least."""
        shortest = STREAM_BLOCK_SECONDS if experiment.is_stream else experiment.block_seconds
        effort = replace(self, block_seconds=max(self.block_seconds, shortest))
        if not experiment.background_loads:
            return effort
        return replace(effort, max_seconds=max(self.max_seconds, OVERLAPPED_SECONDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Raw times of single operations, one for each block."""

    seconds: tuple[float, ...]
    num_iterations: int

    @property
    def is_unstable(self) -> bool:
        """Whether blocks, too few for quartiles, differ by more than quartiles may."""
        width = max(self.seconds) - min(self.seconds)
        few = len(self.seconds) < _MIN_QUARTILE_BLOCKS
        return few and width / statistics.median(self.seconds) > USABLE_SPREAD


def measure(
    experiment: Experiment, *, device: Device, ranks: MeasuringRanks, effort: Effort
) -> Timing:
    """Time the experiment's victim while its background loads run.

    Raises:
        FailedPointError: it failed on a rank, or the background loads paused too often.
        CollectiveError: a rank is gone.
    """
    effort = effort.for_experiment(experiment)
    device.synchronize()
    ranks.control.barrier("a point")
    with (
        device.use(),  # first: a busy device may keep a stream that is new from ever starting
        Background(experiment.background_loads, device=device, ranks=ranks) as background,
    ):
        watch = Stopwatch(experiment, background, device, ranks)
        watch.sustain()
        growth = _MAX_STREAM_GROWTH if experiment.is_stream else _MAX_GROWTH
        iterations = _warm_up(watch, effort, max_growth=growth)
        blocks = _blocks(watch, iterations, effort, is_stream=experiment.is_stream)
    at_once = experiment.victim.at_once
    return Timing(
        seconds=tuple(seconds / at_once for seconds in blocks),
        num_iterations=iterations * at_once,
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
    """Return the times of the blocks that count: of one stream, or until they settle."""
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
