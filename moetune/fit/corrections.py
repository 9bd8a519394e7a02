"""Corrections of costs by observations: the factors, and what refuses them.

A factor is the median of observed over predicted, of one operation around one size.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moetune.domain.corrections import (
    LARGEST_FACTOR,
    CorrectedOp,
    Correction,
)
from moetune.domain.units import format_bytes

MIN_CALLS, MIN_BATCHES = 5, 2
"""Fewer may be one bad minute."""
WINDOW_CALLS = 200
"""Newest calls of an operation that count, at all sizes together."""
LEAST_FACTOR = 1.03
"""A smaller correction is noise."""
_CLUSTER_FACTOR = math.log(1.25)
_CLUSTER_SHARE = 0.3
_CLUSTER_SPREADS = 4.0
# Shares of the calls at the later level, before and after a lasting change: noise may reach it.
_MOST_BEFORE, _LEAST_AFTER = 0.4, 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Observed over predicted times of one operation in calls that were sent together.

    Args:
        batch: higher for later ones.
        ratios: one for each call, in order; positive.
    """

    op: CorrectedOp
    group_size: int
    size: int
    batch: int
    ratios: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The corrections that evidence supports, and why other operations are not corrected.

    Args:
        refused: for good, with a reason.
        waiting: for more calls.
    """

    corrections: tuple[Correction, ...] = ()
    refused: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()


class _Call(NamedTuple):
    """One call of one operation."""

    log_ratio: float
    evidence: Evidence

    @property
    def half_octave(self) -> int:
        """Calls of sizes that differ by less are judged together."""
        return round(2 * math.log2(self.evidence.size))


def judge(evidence: Sequence[Evidence]) -> Judged:
    """Return a correction for each operation and size with enough calls that agree."""
    operations: dict[tuple[CorrectedOp, int], list[_Call]] = {}
    for one in sorted(evidence, key=lambda one: one.batch):
        calls = operations.setdefault((one.op, one.group_size), [])
        calls += [_Call(math.log(ratio), one) for ratio in one.ratios]
    found, refused, waiting = [], [], []
    for _, calls in sorted(operations.items()):
        newest = _newest_level(calls[-WINDOW_CALLS:])
        for size in sorted({call.half_octave for call in newest}):
            mine = [call for call in newest if call.half_octave == size]
            if reason := _too_few(mine):
                waiting.append(reason)
            elif isinstance(outcome := _judge_size(mine), str):
                refused.append(outcome)
            elif outcome is not None:
                found.append(outcome)
    return Judged(
        corrections=tuple(found), refused=tuple(refused), waiting=tuple(waiting)
    )  # fmt: skip


def _too_few(calls: Sequence[_Call]) -> str:
    """Return how many calls are missing; "" where there are enough."""
    num_calls, num_batches = len(calls), len({call.evidence.batch for call in calls})
    if num_calls >= MIN_CALLS and num_batches >= MIN_BATCHES:
        return ""
    return (
        f"{_name(calls[-1].evidence)}: {num_calls} calls in {num_batches} batches do not correct "
        f"it, {MIN_CALLS} in {MIN_BATCHES} do"
    )


def _judge_size(calls: Sequence[_Call]) -> Correction | str | None:
    """Return the correction around one size, why there is none, or None where none is needed."""
    logs = [call.log_ratio for call in calls]
    newest = calls[-1].evidence
    factor = math.exp(statistics.median(logs))
    if (levels := _two_levels(logs)) is not None:
        low, high = (math.exp(level) for level in levels)
        agreed = _agreed(levels)
        if agreed is None:
            return (
                f"{_name(newest)}: observations contradict each other, {low:.2f} and {high:.2f} × "
                "the prediction"
            )
        factor = math.exp(agreed)
    if not 1 / LARGEST_FACTOR <= factor <= LARGEST_FACTOR:
        return (
            f"{_name(newest)}: it takes {factor:.3g} × the prediction, too much to correct: "
            "measure again"
        )
    if 1 / LEAST_FACTOR < factor < LEAST_FACTOR:
        return None
    return Correction(
        op=newest.op, group_size=newest.group_size, size=newest.size, factor=factor,
        num_calls=len(calls), num_batches=len({call.evidence.batch for call in calls}),
    )  # fmt: skip


def _agreed(levels: tuple[float, float]) -> float | None:
    """Return what both of two levels say at least; None where they contradict each other.

    They agree where they are on one side of the prediction, and farther from it than from each
    other: a link that became 3 times as fast may show as 2.4 and 3.4 times in different chunks.
    """
    low, high = levels
    nearer = min(levels, key=abs)
    return nearer if low * high > 0 and high - low <= abs(nearer) else None


def _newest_level(calls: Sequence[_Call]) -> Sequence[_Call]:
    """Return the calls since the last lasting change: those before it describe the past."""
    levels = _two_levels([call.log_ratio for call in calls])
    if levels is None:
        return calls
    is_high = [call.log_ratio > sum(levels) / 2 for call in calls]

    def misfit(index: int) -> int:
        rising = sum(is_high[:index]) + sum(not one for one in is_high[index:])
        return min(rising, len(is_high) - rising)

    index = min(range(1, len(is_high)), key=misfit)
    highs = statistics.fmean(is_high[:index]), statistics.fmean(is_high[index:])
    before, after = highs if highs[1] > highs[0] else (1 - highs[0], 1 - highs[1])
    is_lasting = before <= _MOST_BEFORE and after >= _LEAST_AFTER
    return calls[index:] if is_lasting else calls


def _two_levels(logs: Sequence[float]) -> tuple[float, float] | None:
    """Return the medians of two clusters; None where one level, with stragglers, explains all."""
    ordered = sorted(logs)

    def misfit(index: int) -> float:
        return _deviation(ordered[:index]) + _deviation(ordered[index:])

    index = min(range(1, len(ordered)), key=misfit, default=0)
    low, high = ordered[:index], ordered[index:]
    if min(len(low), len(high)) < max(2, _CLUSTER_SHARE * len(ordered)):
        return None
    levels = statistics.median(low), statistics.median(high)
    spread = misfit(index) / len(ordered)
    gap = levels[1] - levels[0]
    return levels if gap > max(_CLUSTER_FACTOR, _CLUSTER_SPREADS * spread) else None


def _deviation(logs: Sequence[float]) -> float:
    middle = statistics.median(logs)
    return sum(abs(one - middle) for one in logs)


def _name(one: Evidence) -> str:
    ranks = f" of {one.group_size} ranks" if one.group_size else ""
    size = format_bytes(one.size) if one.group_size else f"{one.size:.3g} MACs"
    return f"{one.op}{ranks} around {size}"
