"""Noise of a measurement: uncertain points, drift, shared cores, and a clock that falls."""

import math
import os
import socket
import statistics
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


THROTTLED = "throttled"
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


class Clock:
    """Watches the clock of a device, which falls when it is too hot or takes too much power."""

    def __init__(self, device: Device) -> None:
        self._device, self._best_hertz = device, 0.0

    def is_low(self) -> bool:
        """Return whether it is below nine tenths of the highest that was seen."""
        hertz = self._device.clock_hertz()
        if hertz is None:
            return False
        self._best_hertz = max(self._best_hertz, hertz)
        return hertz < _CLOCK_SHARE * self._best_hertz
