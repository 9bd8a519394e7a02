"""Experts whose widths are cut over ranks: a shard of an expert is an expert of its own."""

from pathlib import Path

import pytest

from moetune.domain.training import FoldedLayout
from tests.ranks import run_ranks
from tests.runtime import width_workers

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(("ep", "etp"), [(1, 2), (2, 2), (1, 4), (2, 1)])
def test_layers_whose_ranks_share_widths_equal_dense(ep: int, etp: int) -> None:
    worker, ranks = width_workers.layers_equal_dense, ep * etp
    assert run_ranks(worker, ranks, etp, ("gelu", "swiglu"), (1, 3)) == [""] * ranks


def test_what_ranks_keep_is_what_the_plan_says() -> None:
    assert run_ranks(width_workers.a_layer_keeps_what_the_plan_says, 2) == [""] * 2


def test_records_count_whole_experts() -> None:
    assert run_ranks(width_workers.records_count_whole_experts, 4) == [""] * 4


def test_checkpoints_load_on_any_cut(tmp_path: Path) -> None:
    folder = str(tmp_path)
    for ranks, etp in ((1, 1), (2, 2), (4, 2), (4, 4), (4, 1), (1, 1)):
        assert run_ranks(width_workers.load_train_and_save, ranks, etp, folder) == [""] * ranks


def test_what_does_not_go_with_a_cut_is_refused_by_name() -> None:
    assert run_ranks(width_workers.refuse_by_name, 2) == [""] * 2


@pytest.mark.parametrize("layout", [
    FoldedLayout(dp=2, tp=2, etp=2), FoldedLayout(dp=4, ep=2, etp=2),
    FoldedLayout(dp=2, pp=2, etp=2), FoldedLayout(cp=4, etp=4),
])  # fmt: skip
def test_ranks_that_share_widths_are_consecutive(layout: FoldedLayout) -> None:
    assert run_ranks(width_workers.groups_are_those_of, 4, layout) == [""] * 4
