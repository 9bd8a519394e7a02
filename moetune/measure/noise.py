"""Noise of a measurement: uncertain points, drift, and other programs on the machine."""

import itertools
import math
import os
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from moetune.domain.samples import GemmPoint, Point, Sample
from moetune.measure.device import Device

AGAIN_SHARE = 0.5
"""Time for noisy points, as a share of the time that all points took, without a budget."""
_CERTAIN = 0.02
_MAX_VISITS = 5
_MIN_QUARTILE_BLOCKS = 4


def next_noisy(samples: Mapping[Point, Sequence[Sample]]) -> Point | None:
    """Return the least certain of the points with the fewest visits; None where all are certain.

    Visits lie apart in time, so that a disturbance of one of them does not meet them all.

    Args:
        samples: of each point, one a visit.
    """
    doubts = {
        point: doubt
        for point, visits in samples.items()
        if len(visits) < _MAX_VISITS and (doubt := relative_uncertainty(visits)) > _CERTAIN
    }
    return min(doubts, key=lambda point: (len(samples[point]), -doubts[point]), default=None)


def relative_uncertainty(visits: Sequence[Sample]) -> float:
    """Return roughly the relative standard error of the median; 0 where a visit failed."""
    if any(visit.error for visit in visits):
        return 0.0
    seconds = list(itertools.chain.from_iterable(visit.seconds for visit in visits))
    if len(seconds) < _MIN_QUARTILE_BLOCKS:
        width = max(seconds) - min(seconds)
    else:
        low, _, high = statistics.quantiles(seconds, n=4)
        width = high - low
    return width / statistics.median(seconds) / math.sqrt(len(seconds))


DRIFT = "drift"
_MAX_DRIFT = 0.03
_QUARTILE_VALUES = 2


def mark_drift(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """Return the samples, those of a session that drifted marked "drift".

    A session measures its first point, a GEMM, again at its end. The machine drifted between two
    samples of a GEMM whose medians differ by more than 3 % and by more than their own spread
    explains. Other points are measured again because they are noisy, which shows no drift.
    """
    drifted: set[int] = set()
    first: dict[Point, int] = {}
    for index, sample in enumerate(samples):
        if sample.error or not isinstance(sample.point, GemmPoint):
            continue
        start = first.setdefault(sample.point, index)
        if start < index:
            first[sample.point] = index
            if has_drifted(samples[start], sample):
                drifted.update(range(start, index + 1))
    return tuple(
        replace(sample, marks=(*sample.marks, DRIFT))
        if index in drifted and DRIFT not in sample.marks
        else sample
        for index, sample in enumerate(samples)
    )


def has_drifted(before: Sample, after: Sample) -> bool:
    """Return whether two samples of one point differ beyond 3 % and beyond their quartiles."""
    change = abs(after.median_seconds / before.median_seconds - 1)
    (low, high), (next_low, next_high) = _quartiles(before), _quartiles(after)
    return change > _MAX_DRIFT and (low > next_high or next_low > high)


def _quartiles(sample: Sample) -> tuple[float, float]:
    if len(sample.seconds) < _QUARTILE_VALUES:
        return sample.seconds[0], sample.seconds[0]
    low, _, high = statistics.quantiles(sample.seconds, n=4, method="inclusive")
    return low, high


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
