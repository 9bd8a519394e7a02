"""Ranks that disagree, die or have other numbers of tokens."""

from pathlib import Path

import pytest

from moetune.domain.document import canonical_json
from moetune.domain.layer import LayerShape
from tests.ranks import run_ranks
from tests.runtime import faults
from tests.runtime.plans import small_plan


def test_every_rank_raises_the_same_error_when_ranks_disagree() -> None:
    assert run_ranks(faults.disagreements, 2) == ["", ""]


@pytest.mark.parametrize("kind", ["all_to_all", "tensor"])
def test_an_error_of_a_router_is_on_all_ranks_which_go_on(kind: faults.Kind) -> None:
    assert run_ranks(faults.failed_router, 2, kind) == ["", ""]


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("kind", ["all_to_all", "tensor"])
def test_survivors_name_the_collective_when_a_rank_dies(kind: faults.Kind, phase: str) -> None:
    reports = run_ranks(faults.death, 2, kind, phase)
    assert reports == ["", "the rank was killed or hung"]


def test_ranks_with_different_tokens_run_the_degree_of_the_agreed_maximum(tmp_path: Path) -> None:
    layer = LayerShape(d_model=8, d_hidden=16, num_experts=4, top_k=2)
    path = tmp_path / "plan.json"
    path.write_text(canonical_json(small_plan(layer=layer)))
    assert run_ranks(faults.agreed_tokens, 2, path) == ["", ""]
