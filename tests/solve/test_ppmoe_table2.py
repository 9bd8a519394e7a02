"""PPMoE's Table 2: the solver's order and ratios against what the paper measured."""

import tomllib
from pathlib import Path

import pytest

from benchmarks.ppmoe.table2 import ROWS, Prediction, is_in_order, predict, ratio
from moetune.domain.profile import profile_from_document

PROFILE = Path(__file__).parents[2] / "profiles" / "v100-x256.toml"


@pytest.fixture(scope="module")
def predictions() -> list[Prediction]:
    profile = profile_from_document(tomllib.loads(PROFILE.read_text(encoding="utf-8")))
    return [predict(row, profile) for row in ROWS]


@pytest.mark.parametrize(("model", "paper"), [("ppmoe-6.7b", 1.26), ("ppmoe-143b", 1.77)])
def test_ppmoe_is_ahead_of_dpmoe_by_what_the_paper_measured_within_a_quarter(
    predictions: list[Prediction], model: str, paper: float
) -> None:
    assert ratio(predictions, model, measured=False) == pytest.approx(paper, rel=0.25)


def test_rows_of_the_small_model_come_in_the_papers_order(predictions: list[Prediction]) -> None:
    assert is_in_order(predictions, "ppmoe-6.7b")
