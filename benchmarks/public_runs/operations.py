"""Single operations that others measured, of `operations.csv`, each against its price in a plan."""

import csv
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.public_runs.operation_rows import Row, questions
from moetune.app.files import bundled_profiles, load_profile_file
from moetune.domain.errors import MoetuneError
from moetune.fit.costs import costs_of
from moetune.solve.model.profiled import device_prices

_MACHINES: Mapping[str, str] = {
    "GB200": "gb200-nvl72", "H100 p5 EFA": "h100-x8-efa", "B300 EFA": "b300-x8-efa",
    "GH200": "gh200-x4", "H100": "h100-x8", "SM90": "h100-x8", "Hopper": "h100-x8",
    "H800": "h800-x8", "H200": "h200-x8", "B200": "b200-x8", "SM100": "b200-x8",
    "Blackwell": "gb200-nvl72", "MI300X": "mi300x-x8", "MI355X": "mi355x-x8",
}  # fmt: skip
"""By the first words of a GPU, the first that fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A measured time with its prediction."""

    group: tuple[str, str, str]
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1


def section(folder: Path) -> Iterator[str]:
    """Yield the page's section on single operations."""
    with (folder / "operations.csv").open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    groups: dict[tuple[str, str, str], list[Priced]] = defaultdict(list)
    skipped: dict[str, int] = defaultdict(int)
    for row in rows:
        try:
            for priced in _priced(row):
                groups[priced.group].append(priced)
        except (ValueError, MoetuneError) as error:
            skipped[" ".join(str(error).split())] += 1
    yield from ("", "## Single operations", "")
    yield (
        f"{len(rows) - sum(skipped.values())} of {len(rows)} rows have a price, some of them for "
        "several times. Operations that a source measured alone are priced without what a step "
        "takes from them; between nodes the network is InfiniBand's unless the machine says `efa`. "
        "Rows in fp8 have the price of as many bytes, and UCCL-EP that of DeepEP on the plain "
        "network."
    )
    yield from ("", "| operation | source | machine | times | off | worst | measured / predicted |")
    yield "|---|---|---|---:|---:|---:|---:|"
    for group in sorted(groups):
        yield f"| {' | '.join(group)} | {' | '.join(_scores(groups[group]))} |"
    yield ""
    for reason, count in sorted(skipped.items(), key=lambda item: -item[1]):
        yield f"- {count} {'row' if count == 1 else 'rows'} not priced: {reason}"


def _scores(rows: Sequence[Priced]) -> Iterator[str]:
    errors = [row.error for row in rows]
    yield str(len(rows))
    yield f"{statistics.median(abs(error) for error in errors):.0%}"
    yield f"{max(errors, key=abs):+.0%}"
    yield f"{statistics.median(row.measured / row.predicted for row in rows):.2f}"


def _priced(row: Row) -> Iterator[Priced]:
    name = _machine(row["gpu"])
    if row["op"].startswith("UCCL"):
        name = name.removesuffix("-efa")  # its proxies post no chunks of DeepEP
    profile = load_profile_file(bundled_profiles()[name])
    step = device_prices(profile, costs_of(profile, allow_modelled=True))
    alone = replace(step, sustained=1.0, gap_seconds=0.0)
    source = re.split(r"[ @#]", row["source"])[0]
    for asked in [*questions(row, alone)]:
        predicted = asked.price(step if asked.in_step else alone)
        yield Priced(
            group=(asked.operation, source, name), measured=asked.seconds, predicted=predicted
        )


def _machine(gpu: str) -> str:
    name = next((name for words, name in _MACHINES.items() if gpu.startswith(words)), None)
    if name is None:
        raise ValueError(f"no reference profile of {gpu}")
    return name
