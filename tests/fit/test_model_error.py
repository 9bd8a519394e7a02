"""Errors of predicted steps: from the record of measured ones, and from a machine's own."""

import itertools
import json
import math
import statistics
from pathlib import Path

import pytest

from moetune.domain.step_errors import SHARED_OCTAVES
from moetune.fit.step_errors import RECORDED_SPREAD

RESULTS = Path(__file__).parents[2] / "docs" / "results"
Cells = list[list[float]]
_MEDIAN = 0.6745
"""Of the absolute value of a standard normal number."""


def record_of_layers() -> Cells:
    """log(measured / predicted) of each degree, by cell of the network lab."""
    cells = json.loads((RESULTS / "netlab-sums.json").read_text(encoding="utf-8"))
    return [
        [
            math.log(statistics.median(cell["seconds"][f"ours:{degree}"]) / predicted)
            for degree, predicted in cell["predicted_seconds"].items()
        ]
        for cell in cells
    ]


def spreads_of(cells: Cells, *, shared: float = 0.0) -> tuple[float, float]:
    """Common and separate spread around 0, by medians: the latter of differences of neighbours.

    Args:
        shared: correlation of the separate errors of neighbours.
    """
    between = [first - second for cell in cells for first, second in itertools.pairwise(cell)]
    separate = statistics.median(map(abs, between)) / _MEDIAN / math.sqrt(2 * (1 - shared))
    whole = statistics.median(abs(error) for cell in cells for error in cell) / _MEDIAN
    return math.sqrt(max(whole**2 - separate**2, 0.0)), separate


def test_the_constants_are_those_of_the_record() -> None:
    """Where this fails the record was measured again: take its spreads as the new constants."""
    spreads = spreads_of(record_of_layers(), shared=1 - 1 / SHARED_OCTAVES)
    assert pytest.approx(spreads, abs=0.001) == (0.0, RECORDED_SPREAD)


def test_the_recorded_steps_lie_in_an_interval_of_their_spreads() -> None:
    end = 1.645 * RECORDED_SPREAD
    inside = [abs(error) <= end for cell in record_of_layers() for error in cell]
    assert 0.80 <= sum(inside) / len(inside) <= 0.95
