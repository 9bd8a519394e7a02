"""Noise of a measurement: uncertain points, drift, and other programs on the machine."""

import math
import os
import socket
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from moetune.domain.samples import GemmPoint, Point, Sample, undisturbed
from moetune.measure.device import Device

CERTAIN = 0.02
"""Relative uncertainty at which a point needs no further visit."""


def relative_uncertainty(visits: Sequence[Sample]) -> float:
    """Return the relative width of the medians of the visits that were disturbed least.

    Infinite for fewer than two of them: nothing tells whether a single visit was disturbed.

    Args:
        visits: of one point, with times.
    """
    medians = [visit.median_seconds for visit in undisturbed(visits)]
    if len(medians) == 1:
        return math.inf
    return max(medians) / min(medians) - 1


_MAX_DRIFT = 0.03


def has_drifted(samples: Sequence[Sample]) -> bool:
    """Return whether the machine's speed changed by more than 3 % during the visits.

    Compared are the first and the last visit of each GEMM, whose times repeat best; the median of
    all of them, as single visits may be disturbed.
    """
    visits: dict[Point, list[float]] = {}
    for sample in samples:
        if isinstance(sample.point, GemmPoint) and not sample.error:
            visits.setdefault(sample.point, []).append(sample.median_seconds)
    changes = [seconds[-1] / seconds[0] - 1 for seconds in visits.values() if len(seconds) > 1]
    return bool(changes) and abs(statistics.median(changes)) > _MAX_DRIFT


BUSY = "busy"
THROTTLED = "throttled"
_TICKS = "SC_CLK_TCK"
# /proc/stat counts in ticks of 10 ms: shorter spans say nothing.
_SHORTEST_SECONDS = 0.2
_BUSY_SHARE = 0.1
_CLOCK_SHARE = 0.9
_BOOT = Path("/proc/sys/kernel/random/boot_id")

Cores = tuple[str, frozenset[int]]
"""Boot id of a machine, and its cores that a process may use."""


def process_cores() -> Cores:
    """Return the machine and the cores of this process."""
    try:
        boot = _BOOT.read_text()
    except OSError:
        boot = socket.gethostname()
    return boot, frozenset(os.sched_getaffinity(0))


def num_sharers(cores: Sequence[Cores]) -> tuple[int, ...]:
    """Return how many ranks share each rank's cores, itself included.

    A rank with several cores counts on each of them by its share.
    """
    loads = [
        sum(len(mine & theirs) / len(theirs) for where, theirs in cores if where == machine)
        for machine, mine in cores
    ]
    return tuple(max(round(load), 1) for load in loads)


class Load:
    """Monitor of this rank's cores and its device's clock between calls of `signs`.

    Args:
        sharers: ranks on the same cores, with this one; they are assumed to work as much.
    """

    def __init__(self, device: Device, *, sharers: int = 1, root: Path = Path("/")) -> None:
        self._device, self._sharers, self._stat = device, sharers, root / "proc/stat"
        self._cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        self._best_hertz = 0.0
        self._before = self._now()

    def signs(self) -> tuple[bool, bool]:
        """Return whether others were busy, and the clock was low, since the last answer.

        The first is False for spans too short to tell, which are added to the next one.
        """
        return self._is_busy(), self._is_throttled()

    def _is_busy(self) -> bool:
        now = self._now()
        wall, own, busy = (one - other for one, other in zip(now, self._before, strict=True))
        if wall < _SHORTEST_SECONDS:
            return False
        self._before = now
        mine = own * self._sharers
        free = max(len(self._cores) * wall - mine, 0.0)
        # Other programs disturb only where they leave no idle core to use instead.
        idle = len(self._cores) * wall - busy
        return busy - mine > _BUSY_SHARE * len(self._cores) * wall and idle < free / 2

    def _now(self) -> tuple[float, float, float]:
        """Return the wall clock, this process's and everyone's seconds on these cores."""
        times = os.times()
        return time.perf_counter(), times.user + times.system, self._busy_seconds()

    def _busy_seconds(self) -> float:
        try:
            lines = self._stat.read_text().splitlines()
        except OSError:
            return 0.0
        ticks = 0
        for line in lines:
            name, *values = line.split()
            if name in self._cores:
                # Without interrupts: those of our own packets are no other program's.
                user, nice, system, *_, steal = map(int, values[:8])
                ticks += user + nice + system + steal
        return ticks / os.sysconf(_TICKS)

    def _is_throttled(self) -> bool:
        hertz = self._device.clock_hertz()
        if hertz is None:
            return False
        self._best_hertz = max(self._best_hertz, hertz)
        return hertz < _CLOCK_SHARE * self._best_hertz
