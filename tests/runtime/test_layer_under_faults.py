"""Ranks that disagree or die, wrappers, plans shared between ranks."""

from pathlib import Path

import pytest
import torch

from moetune.domain.document import canonical_json
from moetune.domain.layer import LayerShape
from tests.ranks import run_ranks
from tests.runtime import faults
from tests.runtime.plans import small_plan


@pytest.mark.parametrize("kind", ["degree", "dtype", "width", "gradients"])
def test_every_rank_raises_the_same_error_when_ranks_disagree(kind: str) -> None:
    assert run_ranks(faults.disagreement, 2, kind) == ["", ""]


@pytest.mark.parametrize("worker", [faults.dying_rank, faults.death_in_backward])
def test_survivors_name_the_collective_when_a_rank_dies(worker: object) -> None:
    reports = run_ranks(worker, 2)  # type: ignore[arg-type]  # both are workers
    assert reports == ["", "the rank was killed or hung"]


def test_ddp_with_prepared_experts_equals_one_process_on_the_whole_batch(tmp_path: Path) -> None:
    faults.save_whole_batch(tmp_path / "whole.pt")
    assert run_ranks(faults.ddp_equals_whole_batch, 2, tmp_path / "whole.pt") == ["", ""]


def test_experts_start_the_same_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    torch.save(faults.make().state_dict(), tmp_path / "whole.pt")
    assert run_ranks(faults.initial_weights, 2, tmp_path / "whole.pt") == ["", ""]


def _write_plan(folder: Path) -> Path:
    layer = LayerShape(d_model=8, d_hidden=16, num_experts=4, top_k=2)
    path = folder / "plan.json"
    path.write_text(canonical_json(small_plan(layer=layer)))
    return path


def test_one_rank_reads_the_plans_and_all_ranks_have_them(tmp_path: Path) -> None:
    _write_plan(tmp_path)
    assert run_ranks(faults.shared_plans, 2, tmp_path) == ["", ""]


def test_every_rank_raises_when_the_first_cannot_read_the_plans(tmp_path: Path) -> None:
    assert run_ranks(faults.shared_failure, 2, tmp_path) == ["", ""]


def test_ranks_with_different_tokens_run_the_degree_of_the_agreed_maximum(tmp_path: Path) -> None:
    assert run_ranks(faults.agreed_tokens, 2, _write_plan(tmp_path)) == ["", ""]
