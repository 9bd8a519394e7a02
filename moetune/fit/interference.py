"""Interference: the slowdown that overlapped operations cause each other.

The table has a factor for each class and each set of other classes that run. A single factor for
all sizes is wrong if the cores that compute also drive the link. There an exchange costs
computation a constant (calls and wake-ups) plus its copies, however long it takes on the wire. With
gloo on two cores 0.25 ms plus 0.1 to 0.6 ms a MiB were measured at any link rate. That is a quarter
of a small exchange and a tenth of a large exchange. With a single factor plans used too many
chunks.
"""

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from moetune.domain.arrays import Floats, Sizes
from moetune.domain.cost_keys import CollectiveKey
from moetune.domain.interference import CommSpeed, CompSpeed, Interference, MemSpeed, SpeedTable
from moetune.domain.samples import ResourceClass
from moetune.fit.curve import curve_through
from moetune.fit.pool import InterferenceKey, Pool

_LEAST_SPEED = 0.1
_NONE: frozenset[ResourceClass] = frozenset()
_COMP_ALONE: tuple[ResourceClass, frozenset[ResourceClass]] = ("comp", _NONE)


def interference_of(times: Mapping[InterferenceKey, tuple[float, ...]]) -> Interference:
    """Return the speeds: median time alone over median time with the others, at most 1.

    A set of others that was not measured, or has no baseline, counts as undisturbed.

    Args:
        times: raw seconds by victim and running others; without others it is the baseline.

    Source: MPipeMoE §II-C, Fig. 3.
    """
    medians = {key: np.asarray(statistics.median(some)) for key, some in times.items() if some}
    speeds = measured_speeds(medians)

    def of(victim: ResourceClass) -> dict[str, float]:
        return {key: speed.item() for (name, key), speed in speeds.items() if name == victim}

    return Interference(
        comp=CompSpeed(**of("comp")), comm=CommSpeed(**of("comm")), mem=MemSpeed(**of("mem"))
    )


def measured_speeds(medians: Mapping[InterferenceKey, Floats]) -> SpeedTable:
    """Return the speeds of `interference_of` for the given median times."""
    speeds: dict[tuple[str, str], Floats] = {}
    for (victim, rivals), disturbed in medians.items():
        alone = medians.get((victim, _NONE))
        if alone is not None and rivals:
            key = "all" if len(rivals) > 1 else next(iter(rivals))
            speeds[victim, key] = np.minimum(1.0, alone / disturbed)
    return speeds


def speeds_of(table: Interference) -> SpeedTable:
    """Return the speeds of a table as zero-dimensional arrays."""
    return {
        (victim, rivals): np.asarray(speed)
        for victim, speeds in asdict(table).items()
        for rivals, speed in speeds.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapLoss:
    """Seconds that computation, or the exchange, loses when one exchange overlaps computation.

    Args:
        sizes: bytes, ascending.
        seconds: at those sizes.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def speed(self, num_bytes: Sizes, exchange_seconds: Sizes) -> Floats:
        """Return the speed of computation during such exchanges: 1 − loss / time."""
        seconds = np.asarray(exchange_seconds, float)
        with np.errstate(divide="ignore", invalid="ignore"):
            speeds = np.clip(1 - self._loss_seconds(num_bytes) / seconds, _LEAST_SPEED, 1.0)
        return np.where(seconds, speeds, 1.0)

    def stretched_speed(self, num_bytes: Sizes, exchange_seconds: Sizes) -> Floats:
        """Return the speed of exchanges that take that time alone: time / (time + loss)."""
        seconds = np.asarray(exchange_seconds, float)
        with np.errstate(divide="ignore", invalid="ignore"):
            speeds = np.maximum(seconds / (seconds + self._loss_seconds(num_bytes)), _LEAST_SPEED)
        return np.where(seconds, speeds, 1.0)

    def _loss_seconds(self, num_bytes: Sizes) -> Floats:
        """Return the loss: constant below the sizes, linear between and above them."""
        asked, sizes, seconds = np.asarray(num_bytes), np.array(self.sizes), np.array(self.seconds)
        if len(sizes) == 1:
            return np.broadcast_to(seconds[0], asked.shape)
        left = np.clip(np.searchsorted(sizes, asked), 1, len(sizes) - 1) - 1
        slopes = np.diff(seconds) / np.diff(sizes)
        above = seconds[left] + slopes[left] * (asked - sizes[left])
        losses: Floats = np.where(asked <= sizes[0], seconds[0], np.maximum(above, 0.0))
        return losses


def overlap_loss(samples: Pool, victim: ResourceClass) -> OverlapLoss | None:
    """Return the time that computation or exchanges lose in overlap; None if not measured.

    An exchange of t seconds that lowers the speed of computation to σ costs it (1 − σ)·t. An
    exchange loses the extra time that it takes during computation.
    """
    alone, collectives = samples.interference.get(_COMP_ALONE), samples.of(CollectiveKey)
    exchanges = [key for key in collectives if key.op == "all_to_all"]
    overlapped = samples.overlapped.get(victim)
    if not overlapped or not exchanges or (victim == "comp" and not alone):
        return None
    group = max(key.group for key in exchanges)
    largest = [key for key in exchanges if key.group == group]
    lost = {}
    for (size, is_alone), times in overlapped.items():
        # Take the key with the most in flight, unless the exchange is alone.
        series = collectives[(min if is_alone else max)(largest)]
        exchange = curve_through(sizes=series.sizes, seconds=series.medians).predict(size).seconds
        lost[size] = statistics.median(times) - exchange
        if victim == "comp" and alone:
            speed = statistics.median(alone) / statistics.median(times)
            lost[size] = (1 - speed) * exchange
    sizes = sorted(lost)
    return OverlapLoss(
        sizes=tuple(map(float, sizes)), seconds=tuple(max(lost[size], 0.0) for size in sizes)
    )
