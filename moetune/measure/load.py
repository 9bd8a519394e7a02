"""Signs that somebody else uses the machine while it is measured."""

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from moetune.measure.device import Device

BUSY = "busy"
THROTTLED = "throttled"
_TICKS = "SC_CLK_TCK"
# /proc/stat counts in ticks of 10 ms: shorter spans say nothing.
_SHORTEST_SECONDS = 0.2
_BUSY_SHARE = 0.1
_CLOCK_SHARE = 0.9
_BOOT = Path("/proc/sys/kernel/random/boot_id")

Cores = tuple[str, frozenset[int]]
"""A machine that is up, and the cores of it that a process may use."""


def own_cores() -> Cores:
    """Return this process's."""
    try:
        boot = _BOOT.read_text()
    except OSError:
        boot = socket.gethostname()
    return boot, frozenset(os.sched_getaffinity(0))


def num_sharers(cores: Sequence[Cores]) -> tuple[int, ...]:
    """Return for how many ranks each rank's cores have to do, itself included.

    A rank on several cores counts on each of them for its share.
    """
    loads = [
        sum(len(mine & theirs) / len(theirs) for where, theirs in cores if where == machine)
        for machine, mine in cores
    ]
    return tuple(max(round(load), 1) for load in loads)


class Load:
    """Watches this rank's cores and its device's clock between calls of `signs`.

    Args:
        sharers: ranks on the same cores, this one included; they are taken to work as much.
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
        # Others disturb where they use cores, and there is no idle one left to use instead.
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
                # Without interrupts: those of our own packets count for nobody.
                user, nice, system, *_, steal = map(int, values[:8])
                ticks += user + nice + system + steal
        return ticks / os.sysconf(_TICKS)

    def _is_throttled(self) -> bool:
        hertz = self._device.clock_hertz()
        if hertz is None:
            return False
        self._best_hertz = max(self._best_hertz, hertz)
        return hertz < _CLOCK_SHARE * self._best_hertz
