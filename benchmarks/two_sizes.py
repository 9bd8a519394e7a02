"""Curves through two sizes of public measurements, at the sizes between them.

`python -m benchmarks.two_sizes FOLDER` reads collectives.csv and gemm_bf16.csv there, keeps two
sizes of each curve, and compares the times between them with a power of the size and with the
straight line in size and time, which `moetune.fit.curve` takes.
"""

import argparse
import csv
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from moetune.fit.curve import curve_through
from moetune.fit.left_out import LINE_ERROR

_RESULT = Path("docs/results/two-sizes.md")
_COLLECTIVES, _GEMMS = "collectives.csv", "gemm_bf16.csv"
_RATIOS = (16, 64, 512, 4096)
_NEAR = 1.5
"""Sizes are taken for so far apart if their ratio is within this factor."""

Curves = Mapping[object, Mapping[int, float]]


def main() -> None:
    """Compare, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, default=_RESULT)
    given = parser.parse_args()
    missing = [name for name in (_COLLECTIVES, _GEMMS) if not (given.folder / name).is_file()]
    if missing:
        parser.error(f"{given.folder} has no {' and no '.join(missing)}")
    columns = ("system", "nccl_or_stack", "op", "gpus")
    collectives = _curves(given.folder / _COLLECTIVES, columns, "bytes", "median_us")
    gemms = _curves(given.folder / _GEMMS, ("device", "n", "k"), "m", "us")
    given.output.write_text(_page(collectives, gemms), encoding="utf-8")
    print(given.output.read_text(encoding="utf-8"))


def _curves(path: Path, key: Sequence[str], size: str, microseconds: str) -> Curves:
    found: dict[object, dict[int, float]] = defaultdict(dict)
    with path.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            found[tuple(row[one] for one in key)][int(row[size])] = float(row[microseconds])
    return found


def _errors(curves: Curves, ratio: int) -> Iterator[tuple[float, float]]:
    """Yield |predicted / measured − 1| of a power and of the line, at sizes between two."""
    for curve in curves.values():
        for low, high in itertools.combinations(sorted(curve), 2):
            if not ratio / _NEAR < high / low < ratio * _NEAR or curve[high] < curve[low]:
                continue
            line = curve_through(sizes=(low, high), seconds=(curve[low], curve[high]))
            power = math.log(curve[high] / curve[low]) / math.log(high / low)
            for size in (one for one in curve if low < one < high):
                by_power = curve[low] * (size / low) ** power
                by_line = line.predict(size).seconds
                yield abs(by_power / curve[size] - 1), abs(by_line / curve[size] - 1)


def _page(collectives: Curves, gemms: Curves) -> str:
    lines = [
        "# Curves through two sizes",
        "",
        (
            f"Of {len(collectives)} curves of collectives and {len(gemms)} of GEMMs in bfloat16 "
            "that others measured on GPUs, two sizes were kept: |predicted / measured − 1| at all "
            "sizes between them, median and 90th percentile in percent. A profile takes the line, "
            f"with {100 * LINE_ERROR:.1f} % for each factor of e between the two as its error."
        ),
        "",
        "| ratio of the sizes | collectives, power | line | GEMMs, power | line | error taken |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for ratio in _RATIOS:
        cells = [
            f"{100 * np.median(one):.1f}, {100 * np.percentile(one, 90):.0f}"
            for curves in (collectives, gemms)
            for one in zip(*_errors(curves, ratio), strict=True)
        ]
        cells.append(f"{100 * LINE_ERROR * math.log(ratio):.1f}")
        lines.append(f"| {ratio:,} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
