"""Plans that place the experts of a model's layers, on ranks over gloo."""

from pathlib import Path
from typing import Any

import pytest

from tests.app import placed_model_workers as placed
from tests.ranks import run_ranks

TWO: tuple[dict[str, Any], ...] = (
    {"dp": 2, "ep": 2, "zero": 0},
    {"dp": 2, "ep": 2, "overlap": "chunks", "degree": {"forward": 3, "backward": 3}},
)
FOUR: tuple[dict[str, Any], ...] = (
    {"dp": 4, "ep": 2},
    {"dp": 2, "pp": 2, "ep": 2, "recompute": ["full"]},
)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("num_ranks", "layouts"), [(2, TWO), pytest.param(4, FOUR, marks=pytest.mark.thorough)]
)
def test_placed_models_train_alike(num_ranks: int, layouts: tuple[dict[str, Any], ...]) -> None:
    worker = placed.placed_models_train_as_one_process_does
    assert run_ranks(worker, num_ranks, layouts) == [""] * num_ranks


@pytest.mark.dist
def test_gradients_are_those_of_the_natural_order() -> None:
    assert run_ranks(placed.gradients_are_those_of_the_natural_order, 2) == ["", ""]


@pytest.mark.dist
def test_checkpoints_have_the_natural_order(tmp_path: Path) -> None:
    worker = placed.checkpoints_have_the_natural_order
    assert run_ranks(worker, 2, str(tmp_path / "checkpoint")) == ["", ""]


@pytest.mark.dist
def test_values_are_at_their_experts_and_state_dicts_have_copies() -> None:
    assert run_ranks(placed.values_do_not_depend_on_the_placement, 2) == ["", ""]
    assert run_ranks(placed.written_and_not_loaded_is_an_error, 2) == ["", ""]


@pytest.mark.dist
def test_records_are_of_the_whole_model() -> None:
    layouts = ({"dp": 2, "ep": 2}, {"pp": 2})
    assert run_ranks(placed.records_are_of_the_whole_model, 2, layouts) == ["", ""]


@pytest.mark.dist
def test_what_cannot_place_refuses_by_name() -> None:
    assert run_ranks(placed.what_cannot_place_refuses, 2) == ["", ""]
