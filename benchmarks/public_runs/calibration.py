"""Calibration by observed runs on the record: each run is predicted from others of its group."""

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.public_runs.score import Scored
from moetune.domain.records import decisions_of
from moetune.solve.model.calibration import Decided, expected

_ABOUT = """# Calibration by observed runs, on the public record

A group are the runs of a machine and a release of a source, or a document of it where it names no
version: observed runs calibrate no other version. Each run's step is predicted from others of its
group as [`moetune plan`](../observe.md) does after so many were observed: each of them alone, or
four draws of three. "Off" is the median of |predicted / measured − 1|, "inside" the share of runs
inside the range for nine in ten. Words are of what is decided, such as "tp 8" or "fp8": a changed
value is two. The shares of the law's variance were fitted to the same record: four numbers to
{} runs. `python -m benchmarks.public_runs FOLDER` writes this."""
_CAUSES = """\
A run says the less of another, the more decisions differ. With that the record is likelier by 23 in
the logarithm than with a share for each model, and by 24 where each source's runs are judged by a
law that was fitted without them. Errors are taken over by 0.9 from the same run, and by 0.15 from
another model's: torchtitan's are more in the median after a single run, and less in the mean.

Of torchtitan's Qwen3-32B (#1690), runs with tp 4 and 8 take 1.00 to 1.03 times their prediction, as
theirs has what #1870 mended: queries and keys of all heads on each tensor rank. Of its Llama 3 8B,
those with cp 4 and 8 take 1.4 to 1.5 times, and all others 0.95 to 1.1. The ring of then repeated
keys and merged its steps in float32, which explains 0.1 of it; nothing read explains the rest.
ModelZoo's runs on H100, which change single decisions, take 0.86 to 1.19 times their prediction.

Other laws were tried and left. A factor for each kind of part would turn the order of layouts. With
the global batch among the decisions the record is less likely by 3. Without ranks and replicas, and
with length and dispatcher 4.5 times as heavy, sources that a law was not fitted to are likelier by
18, dgxc-benchmarking by 13 of these, but torchtitan less by 9: off by 5.7 % in place of 5.9.

From the run of its group that differs least in its model and then in words, a run is 3.8 % off."""


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
            places, of = [_decided(other) for other in near], _decided(row)
            logs = [other.log_ratio for other in near]
            mean, half = expected(places, logs, of=of, target=run.target)
            kinds = "all", _nearest(places, of), run.source
            off = mean - row.log_ratio
            before, after = abs(math.expm1(-row.log_ratio)), abs(math.expm1(off))
            yield _Prediction(run.name, kinds, before, after, abs(off) <= half)


def _decided(row: Scored) -> Decided:
    job = row.run.job
    words = decisions_of(job.world_size, job.length, job.dtype, row.run.layout.all_words)
    return Decided(job.decoder.name, words)


def _nearest(places: Sequence[Decided], of: Decided) -> str:
    """Return how near the nearest run is, by the words in which it differs."""
    words = [len(place.decisions ^ of.decisions) for place in places if place.model == of.model]
    if not words:
        return "another model"
    spans = {0: "0", 2: "1 or 2", 6: "3 to 6", 12: "7 to 12"}
    span = next((span for most, span in spans.items() if min(words) <= most), "over 12")
    return f"the same model, {span} words differ"


def _cells(rows: Sequence[_Prediction]) -> str:
    inside = statistics.fmean(row.is_inside for row in rows)
    return f"{statistics.median(row.after for row in rows):.1%} | {inside:.0%}"
