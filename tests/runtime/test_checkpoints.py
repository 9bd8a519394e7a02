"""Checkpoints of experts: saved on some ranks, loaded on others."""

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.runtime import checkpoint_workers as workers


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of two ranks, and of four."""
    folder = tmp_path_factory.mktemp("checkpoints")
    assert run_ranks(workers.save_on_two, 2, folder) == [""] * 2
    assert run_ranks(workers.load_on_four_and_save, 4, folder) == [""] * 4
    return folder


def test_two_ranks_load_what_four_saved(saved: Path) -> None:
    assert run_ranks(workers.load_on_fewer, 2, saved) == [""] * 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process is meant
def test_one_rank_loads_what_four_saved(saved: Path) -> None:
    workers.load_on_fewer(saved)
