"""Corrections of costs by observations: the factors, what refuses them, and the corrected costs.

A factor is the median of observed over predicted, of one operation around one size. It holds
`FULL_OCTAVES` above and below that size and fades to 1 at `NO_OCTAVES`, on logarithmic scales: a
slower link is slower for other chunks, too, and far away nothing was observed.
"""

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from moetune.domain.corrections import (
    LARGEST_FACTOR,
    CorrectedOp,
    Correction,
    distance_octaves,
)
from moetune.domain.costs import (
    CopyMode,
    Costs,
    Estimate,
    Interference,
    LinearCost,
    OverlapSpeeds,
)
from moetune.domain.samples import CollectiveOp, Direction, GemmForm

MIN_CALLS, MIN_BATCHES = 5, 2
"""Fewer may be one bad minute."""
WINDOW_CALLS = 200
"""Newest calls of an operation that count, at all sizes together."""
FULL_OCTAVES, NO_OCTAVES = 4.0, 8.0
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
    if (levels := _two_levels(logs)) is not None:
        low, high = (math.exp(level) for level in levels)
        return (
            f"{_name(newest)}: observations contradict each other, {low:.2f} and {high:.2f} × the "
            "prediction"
        )
    factor = math.exp(statistics.median(logs))
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
    return f"{one.op}{ranks} around {one.size:.3g} {'bytes' if one.group_size else 'MACs'}"


def factor_at(corrections: Sequence[Correction], size: float) -> float:
    """Return the factor at a size.

    Args:
        corrections: of one operation, at any sizes; none is 1.
    """
    if not corrections or size <= 0:
        return 1.0
    known = sorted(corrections, key=lambda one: one.size)
    logs = [math.log(one.factor) for one in known]
    at = bisect_right([one.size for one in known], size)
    below, above = max(at - 1, 0), min(at, len(known) - 1)
    log = logs[below]
    if known[above].size > known[below].size:
        whole = math.log(known[above].size / known[below].size)
        log += (logs[above] - log) * math.log(size / known[below].size) / whole
    distance = min(distance_octaves(size, known[index].size) for index in (below, above))
    share = (NO_OCTAVES - distance) / (NO_OCTAVES - FULL_OCTAVES)
    return math.exp(log * min(max(share, 0.0), 1.0))


def corrected(costs: Costs, corrections: Sequence[Correction]) -> Costs:
    """Return the costs with every operation's times multiplied by its factor."""
    return CorrectedCosts(costs, corrections) if corrections else costs


class CorrectedCosts:
    """Costs (`domain.costs.Costs`) under corrections; a corrected operation has no α–β line."""

    def __init__(self, costs: Costs, corrections: Iterable[Correction]) -> None:
        self._costs = costs
        self._known: dict[tuple[str, int], list[Correction]] = {}
        for one in corrections:
            self._known.setdefault((one.op, one.group_size), []).append(one)

    @property
    def interference(self) -> Interference:
        """As measured: what operations cost each other is not corrected."""
        return self._costs.interference

    @property
    def copy_mode(self) -> CopyMode | None:
        """As measured."""
        return self._costs.copy_mode

    def overlap_speeds(self, *, exchange_bytes: float, exchange_seconds: float) -> OverlapSpeeds:
        """Return the measured speeds of an exchange that takes as long."""
        return self._costs.overlap_speeds(
            exchange_bytes=exchange_bytes, exchange_seconds=exchange_seconds
        )

    def burst_seconds(self, *, op: CollectiveOp, group_size: int, num_nodes: int = 0) -> float:
        """Return the measured lead of the link after a pause."""
        return self._costs.burst_seconds(op=op, group_size=group_size, num_nodes=num_nodes)

    def gemm_line(self, *, dtype: str) -> LinearCost | None:
        """Return the line, None where GEMMs are corrected."""
        is_corrected = any(not group_size for _, group_size in self._known)
        return None if is_corrected else self._costs.gemm_line(dtype=dtype)

    def collective_line(
        self, *, op: CollectiveOp, group_size: int, num_nodes: int = 0
    ) -> LinearCost | None:
        """Return the line, None where the collective is corrected."""
        if (op, group_size) in self._known:
            return None
        return self._costs.collective_line(op=op, group_size=group_size, num_nodes=num_nodes)

    def gemm(
        self, *, dtype: str, product: GemmForm, num_experts: int, rows: float, d_in: int, d_out: int
    ) -> Estimate:
        """Return the corrected time; backward forms have the backward experts' factor."""
        found = self._costs.gemm(
            dtype=dtype, product=product, num_experts=num_experts, rows=rows, d_in=d_in,
            d_out=d_out,
        )  # fmt: skip
        op: CorrectedOp = "experts_forward" if product == "forward" else "experts_backward"
        return self._times(found, (op, 0), num_experts * rows * d_in * d_out)

    def rows_op(self, *, op: str, dtype: str, rows: float, width: int) -> Estimate | None:
        """Return the measured time: the GEMMs carry the experts' correction."""
        return self._costs.rows_op(op=op, dtype=dtype, rows=rows, width=width)

    def collective(
        self,
        *,
        op: CollectiveOp,
        group_size: int,
        num_bytes: float,
        in_flight: int = 1,
        num_nodes: int = 0,
    ) -> Estimate:
        """Return the corrected time, whatever is in flight."""
        found = self._costs.collective(
            op=op, group_size=group_size, num_bytes=num_bytes, in_flight=in_flight,
            num_nodes=num_nodes,
        )  # fmt: skip
        return self._times(found, (op, group_size), num_bytes)

    def attention(
        self,
        *,
        dtype: str,
        num_sequences: float,
        length: int,
        num_heads: int,
        head_dim: int,
        backward: bool,
    ) -> Estimate | None:
        """Return the measured time."""
        return self._costs.attention(
            dtype=dtype, num_sequences=num_sequences, length=length, num_heads=num_heads,
            head_dim=head_dim, backward=backward,
        )  # fmt: skip

    def copy(self, *, direction: Direction, pinned: bool, num_bytes: float) -> Estimate:
        """Return the measured time."""
        return self._costs.copy(direction=direction, pinned=pinned, num_bytes=num_bytes)

    def _times(self, found: Estimate, key: tuple[str, int], size: float) -> Estimate:
        known = self._known.get(key)
        if known is None:
            return found
        return replace(found, seconds=found.seconds * factor_at(known, size))
