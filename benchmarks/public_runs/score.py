"""Scores of predictions against published runs: ranking, signs of pairs, and absolute errors."""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from benchmarks.public_runs.rows import PublicRun
from moetune.solve.training.memory import RankMemory

_TIE = 1e-9
"""Predicted steps that differ by less are equal: they count for no order."""
_SAME = 0.02
"""Measured steps that differ by less are equal: no order of them is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A run with its prediction."""

    run: PublicRun
    seconds: float
    memory: RankMemory
    usable_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the prediction is no larger than the device's usable memory."""
        return self.memory.peak_bytes <= self.usable_bytes

    @property
    def log_ratio(self) -> float:
        """Logarithm of measured over predicted."""
        return math.log(self.run.seconds / self.seconds)


def kendall(rows: Sequence[Scored]) -> float | None:
    """Return Kendall's τ of the tokens a second; None without a pair that differs."""
    agree = total = 0
    for one, other in itertools.combinations(rows, 2):
        measured = math.log(one.run.tokens / other.run.tokens)
        if abs(measured) < _SAME:
            continue
        total += 1
        predicted = _log_speed(one) - _log_speed(other)
        if abs(predicted) > _TIE:
            agree += 1 if predicted * measured > 0 else -1
    return agree / total if total else None


def regret(rows: Sequence[Scored]) -> float:
    """Return by how much the row that is predicted fastest is slower than the fastest one."""
    chosen = max(rows, key=_log_speed)
    return max(one.run.tokens for one in rows) / chosen.run.tokens - 1


def pairs_of_one_change(rows: Sequence[Scored]) -> list[tuple[Scored, Scored, str]]:
    """Return the pairs of runs of equal jobs whose layouts differ in one thing, and that thing."""
    found = []
    for one, other in itertools.combinations(rows, 2):
        if one.run.job != other.run.job:
            continue
        differ = [
            item.name
            for item in fields(one.run.layout)
            if item.name != "dp"
            and getattr(one.run.layout, item.name) != getattr(other.run.layout, item.name)
        ]
        if len(differ) == 1 and abs(math.log(one.run.tokens / other.run.tokens)) >= _SAME:
            found.append((one, other, differ[0]))
    return found


def is_sign_right(one: Scored, other: Scored) -> bool:
    """Return whether the faster run of a pair is predicted faster."""
    measured = one.run.tokens - other.run.tokens
    return (_log_speed(one) - _log_speed(other)) * measured > 0


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
            rest = [one.log_ratio for one in group if one is not row]
            if rest:
                errors[row.run.name] = math.exp(statistics.median(rest) - row.log_ratio) - 1
    return errors


def _log_speed(row: Scored) -> float:
    return math.log(row.run.job.tokens / row.run.job.world_size / row.seconds)
