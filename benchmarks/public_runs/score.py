"""Scores of predictions against published runs: ranking, signs of pairs, and absolute errors."""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from benchmarks.public_runs.rows import PublicRun
from moetune.solve.model.memory import ERROR_SHARE, ROUTING, RankMemory

_TIE = 1e-9
"""Predicted steps that differ by less are equal: they count for no order."""
_FEW = 2
"""Runs of a set that say nothing of the spread between its layouts."""
_SAME = 0.02
"""Measured steps that differ by less are equal: no order of them is wrong."""


def reserved_bytes(memory: RankMemory) -> float:
    """Return what `torch.cuda.max_memory_reserved` counts: tensors, and what blocks leave free."""
    return memory.peak_bytes - memory.parts[ROUTING] - memory.parts["libraries"]


def allocated_bytes(memory: RankMemory) -> float:
    """Return what `torch.cuda.max_memory_allocated` counts: tensors, not what is around them."""
    return reserved_bytes(memory) - memory.parts["fragmentation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A run with its prediction.

    Args:
        seconds: of a step; None where the run has no time.
        memory: of the fullest rank.
        last_rank: that of the last pipeline rank.
        usable_bytes: of a device, for plans.
    """

    run: PublicRun
    seconds: float | None
    memory: RankMemory
    last_rank: RankMemory
    usable_bytes: int

    @property
    def predicted_seconds(self) -> float:
        """Predicted step of a run that has a time."""
        assert self.seconds is not None  # noqa: S101 - the caller chose such runs
        return self.seconds

    @property
    def predicted_bytes(self) -> float | None:
        """Predicted memory of the scope and rank that the source prints; None where none is."""
        measured = self.run.measured
        if measured is None:
            return None
        memory = self.measured_rank
        by_scope = {
            "allocated": allocated_bytes(memory),
            "reserved": reserved_bytes(memory),
            "device": memory.peak_bytes,
        }
        return by_scope[measured.scope]

    @property
    def measured_rank(self) -> RankMemory:
        """Predicted memory of the rank that the source prints, else of the fullest."""
        measured = self.run.measured
        return self.last_rank if measured and measured.of_last_rank else self.memory

    @property
    def memory_error(self) -> float:
        """Relative error of the memory of a run that has one."""
        measured, predicted = self.run.measured, self.predicted_bytes
        assert measured is not None and predicted is not None  # noqa: S101, PT018 - as the caller says
        return predicted / measured.bytes - 1

    @property
    def fits(self) -> bool:
        """Whether the prediction is no larger than the device's usable memory."""
        return self.memory.peak_bytes <= self.usable_bytes

    @property
    def is_roomy(self) -> bool:
        """Whether the prediction leaves the room for errors that plans leave."""
        return self.memory.peak_bytes * (1 + ERROR_SHARE) <= self.usable_bytes

    @property
    def log_ratio(self) -> float:
        """Logarithm of measured over predicted."""
        return math.log(self.run.seconds / self.predicted_seconds)


def kendall(rows: Sequence[Scored]) -> float | None:
    """Return Kendall's τ of the tokens a second; None without a pair that differs."""
    agree = total = 0
    for row, other in itertools.combinations(rows, 2):
        measured = math.log(row.run.speed / other.run.speed)
        if abs(measured) < _SAME:
            continue
        total += 1
        predicted = _log_speed(row) - _log_speed(other)
        if abs(predicted) > _TIE:
            agree += 1 if predicted * measured > 0 else -1
    return agree / total if total else None


def regret(rows: Sequence[Scored]) -> float:
    """Return by how much the row that is predicted fastest is slower than the fastest one."""
    chosen = max(rows, key=_log_speed)
    return max(row.run.speed for row in rows) / chosen.run.speed - 1


def pairs_of_one_change(rows: Sequence[Scored]) -> list[tuple[Scored, Scored, str]]:
    """Return the pairs of one machine and job whose layouts differ in one thing, and that thing."""
    pairs = []
    for row, other in itertools.combinations(rows, 2):
        if (row.run.job, row.run.profile) != (other.run.job, other.run.profile):
            continue
        differ = [
            item.name
            for item in fields(row.run.layout)
            if item.name != "dp"
            and getattr(row.run.layout, item.name) != getattr(other.run.layout, item.name)
        ]
        if len(differ) == 1 and abs(math.log(row.run.speed / other.run.speed)) >= _SAME:
            pairs.append((row, other, differ[0]))
    return pairs


def is_sign_right(row: Scored, other: Scored) -> bool:
    """Return whether the faster run of a pair is predicted faster."""
    measured = row.run.speed - other.run.speed
    return (_log_speed(row) - _log_speed(other)) * measured > 0


def errors_left_out(rows: Iterable[Scored]) -> dict[str, float]:
    """Return each run's error after its machine's and release's factor, fitted without the run.

    The factor is the median ratio of the others; runs that are alone have none.
    """
    groups: dict[tuple[str, str], list[Scored]] = defaultdict(list)
    for row in rows:
        groups[row.run.profile, row.run.release].append(row)
    errors = {}
    for group in groups.values():
        for row in group:
            rest = [peer.log_ratio for peer in group if peer is not row]
            if rest:
                errors[row.run.name] = math.exp(statistics.median(rest) - row.log_ratio) - 1
    return errors


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordErrors:
    """What the record says of a prediction's error: `solve/model/uncertainty.py` has these.

    Args:
        p05_ratio, p95_ratio: quantiles of measured over predicted seconds.
        set_spread: of the ratio's logarithm between layouts of a set.
    """

    p05_ratio: float
    p95_ratio: float
    set_spread: float


def record_errors(rows: Sequence[Scored]) -> RecordErrors:
    """Return the errors of a record, each set counted once, robustly.

    The spread is 1.4826 times the median deviation from a set's median, times √(n / (n − 1)).
    """
    ratios: list[tuple[float, float]] = []
    deviations: list[tuple[float, float]] = []
    for members in _sets_of(rows).values():
        log_ratios = [row.log_ratio for row in members]
        middle, count = statistics.median(log_ratios), len(log_ratios)
        ratios += [(ratio, 1 / count) for ratio in log_ratios]
        if count > _FEW:
            scale = 1.4826 * math.sqrt(count / (count - 1))
            deviations += [(abs(ratio - middle) * scale, 1 / count) for ratio in log_ratios]
    return RecordErrors(
        p05_ratio=math.exp(_quantile(ratios, 0.05)),
        p95_ratio=math.exp(_quantile(ratios, 0.95)),
        set_spread=_quantile(deviations, 0.5) if deviations else 0.0,
    )


def share_inside(rows: Sequence[Scored]) -> float:
    """Return the share of runs inside the ranges that the runs of all other models make."""
    inside = 0
    for name in {row.run.job.decoder.name for row in rows}:
        others = [row for row in rows if row.run.job.decoder.name != name]
        errors = record_errors(others)
        inside += sum(
            math.log(errors.p05_ratio) <= row.log_ratio <= math.log(errors.p95_ratio)
            for row in rows
            if row.run.job.decoder.name == name
        )
    return inside / len(rows)


def _sets_of(rows: Iterable[Scored]) -> dict[str, list[Scored]]:
    sets: dict[str, list[Scored]] = defaultdict(list)
    for row in rows:
        sets[row.run.set_name].append(row)
    return sets


def _quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """Return the least value that so much of the weight does not exceed."""
    limit, seen = share * sum(weight for _, weight in weighted), 0.0
    for value, weight in sorted(weighted):
        seen += weight
        if seen >= limit:
            return value
    raise AssertionError("no values")


def _log_speed(row: Scored) -> float:
    return math.log(row.run.job.tokens / row.run.job.world_size / row.predicted_seconds)
