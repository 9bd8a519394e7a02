"""Calibration by observed runs on the record: each run is predicted from others of its group."""

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.public_runs.score import Scored
from moetune.solve.model.calibration import expected

_ABOUT = """# Calibration by observed runs, on the public record

A group are the runs of a machine and a release of a source, or a document of it where it names no
version: observed runs calibrate no other version. Each run's step is predicted from others of its
group as [`moetune plan`](../observe.md) does after so many were observed: each of them alone, or
four draws of three. "Off" is the median of |predicted / measured − 1|, "inside" the share of runs
inside the range for nine in ten. The shares of the law's variance were fitted to the same record:
three numbers to {} runs. `python -m benchmarks.public_runs FOLDER` writes this."""
_CAUSES = """\
Where a run does not help, errors are of the kind of layout, and the factor is the same for all
layouts. Of torchtitan's Qwen3-32B (#1690), runs with tp 4 and 8 take 1.2 to 1.4 times their
prediction, and those without 0.8 to 1.0. Of its Llama 3 8B, those with cp 4 and 8 take 1.4 to 1.5
times, and all others 0.97 to 1.1. ModelZoo's runs of Qwen3-235B-A22B are off by 5.1 % as they are.
Five of them on H100, which change single decisions, take 0.86 to 1.19 times their prediction: none
says more of another than that.

Two other laws were tried and left. Shares of torchtitan's own (0.1, 0.2 and 0.7) are likelier on
its runs. Fitted without its 18 runs of Llama 3 they are less likely there than the common ones
(logarithm 21.9 against 24.2). A share of 0.3 for runs of a model with the same kind of layout (tp,
cp and pp above 1) gains 7 in the logarithm, on torchtitan alone: of Megatron's and Bridge's runs
that share is 0.1 and 0."""


class _Prediction(NamedTuple):
    """A run that was predicted from others: errors without and with them, and its place."""

    name: str
    kinds: tuple[str, str, str]
    before: float
    after: float
    is_inside: bool


def lines(scored: Sequence[Scored]) -> Iterator[str]:
    """Yield the page's lines."""
    groups: dict[tuple[str, str, str], list[Scored]] = defaultdict(list)
    timed = [row for row in scored if row.seconds is not None]
    for row in timed:
        run = row.run
        groups[run.profile, run.document or run.release, run.target].append(row)
    single, three = ([*_predictions(list(groups.values()), count)] for count in (1, 3))
    yield from (*_ABOUT.format(len(timed)).splitlines(), "")
    yield "| observed, or source | runs | off | off, 1 run | inside | off, 3 runs | inside |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for place in range(3):
        for kind in sorted({row.kinds[place] for row in single}):
            mine = [[row for row in rows if row.kinds[place] == kind] for rows in (single, three)]
            before = statistics.median(row.before for row in mine[0])
            cells = " | ".join(map(_cells, mine))
            yield f"| {kind} | {len({row.name for row in mine[0]})} | {before:.1%} | {cells} |"
    yield from ("", *_CAUSES.splitlines())


def _predictions(groups: Sequence[list[Scored]], count: int) -> Iterator[_Prediction]:
    """Yield each run's predictions from `count` others, or all of a smaller group."""
    chance = random.Random(0)  # noqa: S311 - no secret
    of_groups = ((row, members) for members in groups if len(members) > 1 for row in members)
    for row, members in of_groups:
        others, run = [other for other in members if other is not row], row.run
        some = min(count, len(others))
        draws = [chance.sample(others, some) for _ in range(4)]
        for near in draws if count > 1 else ([other] for other in others):
            models, model = [other.run.job.decoder.name for other in near], run.job.decoder.name
            logs = [other.log_ratio for other in near]
            mean, half = expected(models, logs, model=model, target=run.target)
            kinds = "all", "the same model" if model in models else "another model", run.source
            off = mean - row.log_ratio
            before, after = abs(math.expm1(-row.log_ratio)), abs(math.expm1(off))
            yield _Prediction(run.name, kinds, before, after, abs(off) <= half)


def _cells(rows: Sequence[_Prediction]) -> str:
    inside = statistics.fmean(row.is_inside for row in rows)
    return f"{statistics.median(row.after for row in rows):.1%} | {inside:.0%}"
