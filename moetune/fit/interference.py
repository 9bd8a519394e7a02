"""Interference: by how much overlapped operations slow each other down.

The table has one factor for each class while each set of others runs. One factor for all sizes is
wrong where the cores that compute also serve the link: an exchange then costs them a constant (its
calls and wake-ups) and its copies, however long it takes on the wire. With gloo on two cores
0.25 ms and 0.1 to 0.6 ms a MiB were measured at any rate of the link: a quarter of a small
exchange and a tenth of a large one. With one factor plans cut too fine.
"""

import statistics
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moetune.domain.arrays import Floats, array_of, is_many, shorter
from moetune.domain.interference import CommSpeed, CompSpeed, Interference, MemSpeed
from moetune.domain.samples import ResourceClass
from moetune.fit.curve import Curve, curve_through
from moetune.fit.pool import InterferenceKey, Pool

_LEAST_SPEED = 0.1
_NONE: frozenset[ResourceClass] = frozenset()
_COMP_ALONE: tuple[ResourceClass, frozenset[ResourceClass]] = ("comp", _NONE)


def interference_of(times: Mapping[InterferenceKey, tuple[float, ...]]) -> Interference:
    """Return speed = median alone / median with the others, at most 1.

    A set of others that was not measured, or has no baseline, is taken as undisturbed.

    Args:
        times: raw seconds by victim and the others that run; no others is the baseline.

    Source: MPipeMoE §II-C, Fig. 3.
    """
    return table_of({key: statistics.median(some) for key, some in times.items() if some})


def table_of(medians: Mapping[InterferenceKey, float]) -> Interference:
    """Return `interference_of` times with these medians; of arrays of medians arrays of speeds."""
    speeds: dict[str, dict[str, float]] = {"comp": {}, "comm": {}, "mem": {}}
    for (victim, others), disturbed in medians.items():
        alone = medians.get((victim, _NONE))
        if alone is not None and others:
            key = "all" if len(others) > 1 else next(iter(others))
            speeds[victim][key] = shorter(1.0, alone / disturbed)
    return Interference(
        comp=CompSpeed(**speeds["comp"]),
        comm=CommSpeed(**speeds["comm"]),
        mem=MemSpeed(**speeds["mem"]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapLoss:
    """Seconds that computation, or else the exchange, loses when one exchange overlaps it.

    Args:
        sizes: bytes, ascending.
        seconds: at those sizes.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def speed(self, num_bytes: float, exchange_seconds: float) -> float:
        """Return the speed of computation during exchanges of that time: 1 − loss / time.

        Of arrays, an array.
        """
        if is_many(exchange_seconds):
            lost = self._many_at(num_bytes) / np.where(exchange_seconds, exchange_seconds, np.inf)
            return array_of(np.clip(1 - lost, _LEAST_SPEED, 1.0))
        if not exchange_seconds:
            return 1.0
        return min(max(1 - self._at(num_bytes) / exchange_seconds, _LEAST_SPEED), 1.0)

    def stretched_speed(self, num_bytes: float, exchange_seconds: float) -> float:
        """Return the speed of exchanges of that time: time / (time + loss); of arrays, an array."""
        if is_many(exchange_seconds):
            whole = exchange_seconds + self._many_at(num_bytes)
            speeds = np.divide(exchange_seconds, whole, out=np.ones_like(whole), where=whole > 0)
            slowest = np.where(exchange_seconds, _LEAST_SPEED, 1.0)
            return array_of(np.maximum(speeds, slowest))
        if not exchange_seconds:
            return 1.0
        return max(exchange_seconds / (exchange_seconds + self._at(num_bytes)), _LEAST_SPEED)

    def _many_at(self, num_bytes: float) -> Floats:
        sizes, seconds = np.asarray(num_bytes), np.array(self.seconds)
        if len(self.sizes) == 1:
            return np.full(sizes.shape, self.seconds[0])
        at = np.clip(np.searchsorted(self.sizes, sizes), 1, len(self.sizes) - 1)
        known, slopes = np.array(self.sizes), np.diff(self.seconds) / np.diff(self.sizes)
        found = seconds[at - 1] + slopes[at - 1] * (sizes - known[at - 1])
        return np.where(sizes <= known[0], seconds[0], np.maximum(found, 0.0))  # type: ignore[no-any-return]

    def _at(self, num_bytes: float) -> float:
        """Return the loss: constant below the sizes, linear between them and on above."""
        sizes, seconds = self.sizes, self.seconds
        if num_bytes <= sizes[0] or len(sizes) == 1:
            return seconds[0]
        at = min(bisect_left(sizes, num_bytes), len(sizes) - 1)
        slope = (seconds[at] - seconds[at - 1]) / (sizes[at] - sizes[at - 1])
        return max(seconds[at - 1] + slope * (num_bytes - sizes[at - 1]), 0.0)


def comp_loss(found: Pool) -> OverlapLoss | None:
    """Return the time that exchanges cost computation; None where not measured.

    An exchange of t seconds during which computation has speed σ takes (1 − σ)·t from it.
    """
    alone = found.interference.get(_COMP_ALONE)
    if not alone:
        return None
    baseline = statistics.median(alone)
    lost = {}
    for (size, is_alone), times in found.overlapped_comp.items():
        exchange = _exchange(found, is_alone=is_alone)
        if exchange is None:
            return None
        lost[size] = (1 - baseline / statistics.median(times)) * exchange.predict(size).seconds
    return _loss(lost)


def comm_loss(found: Pool) -> OverlapLoss | None:
    """Return how much longer exchanges take during computation; None where not measured."""
    lost = {}
    for (size, is_alone), times in found.overlapped_comm.items():
        exchange = _exchange(found, is_alone=is_alone)
        if exchange is None:
            return None
        lost[size] = statistics.median(times) - exchange.predict(size).seconds
    return _loss(lost)


def _exchange(found: Pool, *, is_alone: bool) -> Curve | None:
    """Return the all-to-all of the largest group, with the most in flight unless it is alone."""
    keys = [key for key in found.collective if key[0] == "all_to_all"]
    if not keys:
        return None
    largest = [key for key in keys if key[1:3] == max(one[1:3] for one in keys)]
    series = found.collective[(min if is_alone else max)(largest)]
    return curve_through(sizes=series.sizes, seconds=series.medians)


def _loss(lost: Mapping[int, float]) -> OverlapLoss | None:
    if not lost:
        return None
    sizes = sorted(lost)
    return OverlapLoss(
        sizes=tuple(map(float, sizes)), seconds=tuple(max(lost[size], 0.0) for size in sizes)
    )
