"""Errors of predicted steps: from the record of measured ones, and from a machine's own."""

import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest

from moetune.fit.model_error import (
    OF_LAYERS,
    error_of_degrees,
    model_error_of,
)

RESULTS = Path(__file__).parents[2] / "docs" / "results"
Cells = list[list[float]]


def record_of_layers() -> Cells:
    """log(measured / predicted) of each degree, by cell of the network lab."""
    cells = json.loads((RESULTS / "netlab-sums.json").read_text(encoding="utf-8"))
    return [
        [
            math.log(statistics.median(one["seconds"][f"ours:{degree}"]) / predicted)
            for degree, predicted in one["predicted_seconds"].items()
        ]
        for one in cells
    ]


def test_the_constants_are_those_of_the_record() -> None:
    """Where this fails the record was measured again: take its spreads as the new constants."""
    found = error_of_degrees(record_of_layers())
    assert found is not None
    assert OF_LAYERS.common == pytest.approx(found.common, abs=0.001)
    assert OF_LAYERS.own == pytest.approx(found.own, abs=0.001)


def test_the_recorded_steps_lie_in_an_interval_of_their_spreads() -> None:
    end = 1.645 * math.hypot(OF_LAYERS.common, OF_LAYERS.own)
    inside = [abs(one) <= end for cell in record_of_layers() for one in cell]
    assert 0.80 <= sum(inside) / len(inside) <= 0.95


def cells_with(
    *, common: float, own: float, bias: float = 0.0, num: int = 400, choices: int = 5, seed: int = 0
) -> Cells:
    rng = np.random.default_rng(seed)
    means = bias + common * rng.normal(size=(num, 1))
    found: Cells = (means + own * rng.normal(size=(num, choices))).tolist()
    return found


def test_spreads_of_known_errors_are_found() -> None:
    found = model_error_of(cells_with(common=0.06, own=0.03))
    assert found is not None
    assert found.common == pytest.approx(0.06, rel=0.1)
    assert found.own == pytest.approx(0.03, rel=0.1)


def test_errors_that_neighbouring_degrees_share_are_found() -> None:
    rng = np.random.default_rng(1)
    single = rng.normal(size=(400, 7))
    smooth = 0.05 * (single[:, :-2] + single[:, 1:-1] + single[:, 2:]) / math.sqrt(3)
    found = error_of_degrees((smooth + 0.04 * rng.normal(size=(400, 1))).tolist())
    assert found is not None
    assert found.own == pytest.approx(0.05, rel=0.1)
    assert found.common == pytest.approx(0.04, rel=0.15)


def test_a_bias_counts_as_an_error_and_a_few_wild_steps_do_not() -> None:
    biased = model_error_of(cells_with(common=0.01, own=0.01, bias=0.2))
    assert biased is not None
    assert biased.common == pytest.approx(0.2 / 0.6745, rel=0.1)
    calm = cells_with(common=0.05, own=0.02)
    wild = [[5.0, *cell[1:]] if at % 20 == 0 else cell for at, cell in enumerate(calm)]
    found, plain = model_error_of(wild), model_error_of(calm)
    assert found is not None
    assert plain is not None
    assert found.common == pytest.approx(plain.common, rel=0.15)
    assert found.own == pytest.approx(plain.own, rel=0.15)


def test_cells_of_one_choice_tell_nothing_of_choices() -> None:
    assert model_error_of([]) is None
    assert model_error_of([[]]) is None
    found = model_error_of([[0.1], [-0.1], []])
    assert found is not None
    assert found.own == 0.0
