"""Interference: by how much overlapped operations slow each other down.

The table has one factor for each class while each set of others runs. One factor for all sizes is
wrong where the cores that compute also serve the link: an exchange then costs them a constant (its
calls and wake-ups) and its copies, however long it takes on the wire. With gloo on two cores
0.25 ms and 0.1 to 0.6 ms a MiB were measured at any rate of the link: a quarter of a small
exchange and a tenth of a large one. With one factor plans cut too fine.

Small exchanges may gain: a core that has nothing to do sleeps and wakes late, and computation keeps
it awake. On one machine 1 kB took 1.0 to 2.5 ms alone and 0.8 to 0.9 ms beside GEMMs. They gain no
more than their start-up, so that noise in the times of large ones is no gain.
"""

import statistics
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moetune.domain.arrays import Floats, array_of, floats_of, is_many, shorter
from moetune.domain.interference import (
    FASTEST_EXCHANGE,
    CommSpeed,
    CompSpeed,
    Interference,
    MemSpeed,
)
from moetune.domain.samples import ResourceClass
from moetune.fit.curve import Curve, curve_through
from moetune.fit.pool import InterferenceKey, Overlapped, Pool

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
            lost = self.at_many(num_bytes) / np.where(exchange_seconds, exchange_seconds, np.inf)
            return array_of(np.clip(1 - lost, _LEAST_SPEED, 1.0))
        if not exchange_seconds:
            return 1.0
        return min(max(1 - self.at(num_bytes) / exchange_seconds, _LEAST_SPEED), 1.0)

    def at_many(self, num_bytes: float) -> Floats:
        """Return the losses at an array of sizes, as `at`."""
        sizes, seconds = np.asarray(num_bytes), np.array(self.seconds)
        if len(self.sizes) == 1:
            return np.full(sizes.shape, self.seconds[0])
        at = np.clip(np.searchsorted(self.sizes, sizes), 1, len(self.sizes) - 1)
        known, slopes = np.array(self.sizes), np.diff(self.seconds) / np.diff(self.sizes)
        found = seconds[at - 1] + slopes[at - 1] * (sizes - known[at - 1])
        return np.where(sizes <= known[0], seconds[0], np.maximum(found, 0.0))  # type: ignore[no-any-return]

    def at(self, num_bytes: float) -> float:
        """Return the loss: constant below the sizes, linear between them and on above."""
        sizes, seconds = self.sizes, self.seconds
        if num_bytes <= sizes[0] or len(sizes) == 1:
            return seconds[0]
        at = min(bisect_left(sizes, num_bytes), len(sizes) - 1)
        slope = (seconds[at] - seconds[at - 1]) / (sizes[at] - sizes[at - 1])
        return max(seconds[at - 1] + slope * (num_bytes - sizes[at - 1]), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlappedExchange:
    """What exchanges lose beside computation, and what they gain.

    Args:
        undisturbed: what they take by themselves, over bytes.
        loss: of those that lose.
        sizes, gains: bytes, and the seconds that these gain, 0 of those that lose; may be none.
    """

    undisturbed: Curve
    loss: OverlapLoss
    sizes: tuple[float, ...]
    gains: tuple[float, ...]

    @property
    def is_gain(self) -> bool:
        """Whether exchanges of some size gain."""
        return any(self.gains)

    def speed(self, num_bytes: float, exchange_seconds: float) -> float:
        """Return the speed of exchanges of that time: time / (time − gain + loss).

        The gain is the share of the time that it is of the undisturbed one of that size, so that a
        draw of that time gains as its size does. Of arrays, an array.
        """
        if is_many(exchange_seconds):
            return array_of(self._speeds(np.asarray(num_bytes), np.asarray(exchange_seconds)))
        if not exchange_seconds:
            return 1.0
        beside = exchange_seconds + self.loss.at(num_bytes)
        if self.is_gain:
            beside -= exchange_seconds * float(self._share(np.asarray(num_bytes)))
        return max(exchange_seconds / beside, _LEAST_SPEED)

    def _speeds(self, num_bytes: Floats, exchange_seconds: Floats) -> Floats:
        beside = exchange_seconds + self.loss.at_many(array_of(num_bytes))
        if self.is_gain:
            beside = beside - exchange_seconds * self._share(num_bytes)
        speeds = np.divide(exchange_seconds, beside, out=np.ones_like(beside), where=beside > 0)
        return np.maximum(speeds, np.where(exchange_seconds, _LEAST_SPEED, 1.0))

    def _share(self, num_bytes: Floats) -> Floats:
        """Return the gain's share of exchanges of each size, constant in seconds at both ends."""
        gains = np.interp(num_bytes, self.sizes, self.gains)
        shares = gains / floats_of(self.undisturbed.predict(array_of(num_bytes)).seconds)
        return np.minimum(shares, 1 - 1 / FASTEST_EXCHANGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlappedExchanges:
    """What exchanges take beside computation: those that are alone, and those that are several."""

    alone: OverlappedExchange
    several: OverlappedExchange

    @property
    def is_gain(self) -> bool:
        """Whether exchanges of some size gain."""
        return self.alone.is_gain or self.several.is_gain

    def speed(self, num_bytes: float, exchange_seconds: float, in_flight: int) -> float:
        """Return the speed of exchanges of that time; of arrays, an array."""
        if is_many(in_flight):
            alone, several = (
                one.speed(num_bytes, exchange_seconds) for one in (self.alone, self.several)
            )
            return array_of(np.where(np.equal(in_flight, 1), alone, several))
        one = self.alone if in_flight == 1 else self.several
        return one.speed(num_bytes, exchange_seconds)


def comp_loss(found: Pool) -> OverlapLoss | None:
    """Return the time that exchanges cost computation; None where not measured.

    An exchange of t seconds during which computation has speed σ takes (1 − σ)·t from it. One that
    gains takes t seconds beside computation, as it was measured there.
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
        gained = max(-_taken_longer(found, exchange, (size, is_alone)), 0.0)
        seconds = exchange.predict(size).seconds - gained
        lost[size] = max((1 - baseline / statistics.median(times)) * seconds, 0.0)
    return _loss(lost)


def overlapped_exchanges(found: Pool) -> OverlappedExchanges | None:
    """Return what exchanges take beside computation; None where not measured."""
    curves = {is_alone: _exchange(found, is_alone=is_alone) for is_alone in (True, False)}
    alone, several = curves.values()
    if alone is None or several is None or not found.overlapped_comm:
        return None
    longer = {
        (size, is_alone): _taken_longer(found, alone if is_alone else several, (size, is_alone))
        for size, is_alone in found.overlapped_comm
    }
    return OverlappedExchanges(
        alone=_overlapped(alone, longer, is_alone=True),
        several=_overlapped(several, longer, is_alone=False),
    )


def _taken_longer(found: Pool, exchange: Curve, overlapped: Overlapped) -> float:
    """Return the seconds that an exchange beside computation takes longer, 0 where not measured.

    Shorter by the time of the smallest measured one at most: the rest is the link's.
    """
    size, _ = overlapped
    times = found.overlapped_comm.get(overlapped)
    longer = statistics.median(times) - exchange.predict(size).seconds if times else 0.0
    return max(longer, -exchange.seconds[0])


def _overlapped(
    undisturbed: Curve, longer: Mapping[Overlapped, float], *, is_alone: bool
) -> OverlappedExchange:
    """Return what exchanges of one kind lose and gain: losses hold for both, gains for their own.

    Args:
        longer: seconds of the exchanges of both kinds.
    """
    own = {size: seconds for (size, kind), seconds in longer.items() if kind == is_alone}
    every = {size: seconds for (size, _), seconds in longer.items()} | own
    sizes = sorted(own)
    return OverlappedExchange(
        undisturbed=undisturbed,
        loss=_losses({size: max(seconds, 0.0) for size, seconds in every.items()}),
        sizes=tuple(map(float, sizes)),
        gains=tuple(max(-own[size], 0.0) for size in sizes),
    )


def _exchange(found: Pool, *, is_alone: bool) -> Curve | None:
    """Return the all-to-all of the largest group, with the most in flight unless it is alone."""
    keys = [key for key in found.collective if key[0] == "all_to_all"]
    if not keys:
        return None
    largest = [key for key in keys if key[1:3] == max(one[1:3] for one in keys)]
    series = found.collective[(min if is_alone else max)(largest)]
    return curve_through(sizes=series.sizes, seconds=series.medians)


def _loss(lost: Mapping[int, float]) -> OverlapLoss | None:
    return _losses(lost) if lost else None


def _losses(lost: Mapping[int, float]) -> OverlapLoss:
    sizes = sorted(lost)
    return OverlapLoss(sizes=tuple(map(float, sizes)), seconds=tuple(lost[size] for size in sizes))
