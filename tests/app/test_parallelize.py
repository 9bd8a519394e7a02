"""A model of one's own under plans: one process's losses and weights, or a refusal by name."""

from pathlib import Path
from typing import Any

import pytest
import torch

import moetune
from moetune.app import parallelize
from moetune.domain.errors import InputError
from tests.app import parallelize_workers as par
from tests.ranks import run_ranks
from tests.training_plans import TRAINING, training_plan

THOROUGH = pytest.mark.thorough
TWO: tuple[dict[str, Any], ...] = (
    {"dp": 2, "zero": 1},
    {"dp": 2, "ep": 2, "zero": 3, "overlap": "chunks", "degree": {"forward": 2, "backward": 2}},
    {"pp": 2, "vpp": 2, "recompute": ["full"], "stages": "Et|t|tt|L"},
    {"dp": 2, "ep": 2, "zero": 0},
    {"dp": 2, "ep": 2, "overlap": "chunks", "degree": {"forward": 3, "backward": 3}},
    {"dp": 2, "zero": 3, "recompute": ["full"]},
    {"pp": 2, "stages": "E|t*4L"},
)
FOUR: tuple[dict[str, Any], ...] = (
    {"dp": 2, "pp": 2, "ep": 2},
    {"dp": 4, "ep": 2, "recompute": ["full"]},
    {"dp": 4, "ep": 2, "zero": 3},
    {"dp": 2, "pp": 2, "ep": 2, "zero": 1},
    {"dp": 2, "pp": 2, "vpp": 2, "zero": 3, "micro_batch": 1, "recompute": ["full"]},
)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("num_ranks", "layouts"),
    [(2, TWO[:3]), *(pytest.param(*case, marks=THOROUGH) for case in ((2, TWO[3:]), (4, FOUR)))],
)
def test_a_users_model_trains_as_one_process_does(
    num_ranks: int, layouts: tuple[dict[str, Any], ...]
) -> None:
    assert run_ranks(par.layouts_train_equally, num_ranks, layouts) == [""] * num_ranks


@pytest.mark.dist
@pytest.mark.parametrize(
    "layout",
    [{"dp": 1, "pp": 2}, {"dp": 2, "pp": 1, "ep": 2},
     pytest.param({"dp": 2, "pp": 2, "ep": 2}, marks=THOROUGH)],
)  # fmt: skip
def test_batches_of_other_shapes_are_one_error_on_all_ranks(layout: dict[str, Any]) -> None:
    num_ranks = layout["dp"] * layout["pp"]
    assert run_ranks(par.different_batches_raise_an_error, num_ranks, layout) == [""] * num_ranks


@pytest.mark.dist
@pytest.mark.parametrize(
    "layout",
    [{"pp": 2, "stages": "Ett|ttL"},
     pytest.param({"dp": 2, "pp": 2, "ep": 2, "stages": "Ett|ttL"}, marks=THOROUGH)],
)  # fmt: skip
def test_stages_without_experts_train_and_record(layout: dict[str, Any]) -> None:
    num_ranks = layout.get("dp", 1) * layout["pp"]
    worker = par.stages_without_experts_train_and_record
    assert run_ranks(worker, num_ranks, layout) == [""] * num_ranks


@pytest.mark.dist
def test_experts_of_transformers_in_a_users_model_train_alike() -> None:
    layouts = (
        {"dp": 2, "ep": 2}, {"pp": 2, "zero": 0}, {"dp": 2, "zero": 3},
        {"dp": 2, "ep": 2, "overlap": "chunks", "degree": {"forward": 2, "backward": 2}},
    )  # fmt: skip
    assert run_ranks(par.experts_of_transformers_train_equally, 2, layouts) == ["", ""]


@pytest.mark.dist
def test_states_load_into_another_layout_under_the_models_names(tmp_path: Path) -> None:
    worker = par.checkpoints_and_the_meta_device
    assert run_ranks(worker, 4, str(tmp_path / "checkpoint")) == [""] * 4


@pytest.mark.dist
def test_a_model_without_memory_draws_the_same_values_under_every_layout(tmp_path: Path) -> None:
    worker = par.values_do_not_depend_on_the_layout
    assert run_ranks(worker, 2, str(tmp_path)) == ["", ""]
    first = torch.load(tmp_path / "0-0")
    second = torch.load(tmp_path / "1-0") | torch.load(tmp_path / "1-1")
    assert first.keys() == second.keys()
    assert all(bool((first[name] == second[name]).all()) for name in first)
    assert float(first["inner.blocks.1.ffn.experts.w1"].std()) > 0


@pytest.mark.dist
def test_the_balance_loss_reaches_the_gates_of_every_stage() -> None:
    assert run_ranks(par.balance_reaches_every_gate, 2) == ["", ""]


def test_without_a_process_group_it_says_what_to_call() -> None:
    with pytest.raises(InputError, match="needs a process group") as caught:
        moetune.parallelize(par.decoder(), par.plan_of(1), loss_of=par.loss_of)
    assert "init_process_group" in str(caught.value.hint)


@pytest.mark.dist
def test_what_cannot_run_is_refused_by_name_on_all_ranks() -> None:
    assert run_ranks(par.refusals, 2) == ["", ""]


def test_blocks_of_multi_token_prediction_are_refused_and_stages_without_them_are_not() -> None:
    def usable(stages: str | None) -> object:
        layout = {"dp": 8, "tp": 1, "dispatcher": "all_to_all", "overlap": "none", "stages": stages,
                  "offload_activations": 0.0, "offload_optimizer": 0.0}  # fmt: skip
        plan = training_plan(
            inputs=TRAINING["inputs"] | {"target": "moetune"}, layout=TRAINING["layout"] | layout
        )
        return parallelize._usable_layout(plan)

    assert usable(None)
    assert usable("Et*8|t*8L")
    with pytest.raises(InputError, match="multi-token prediction"):
        usable("Et*8|t*8mL")
