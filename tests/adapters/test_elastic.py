"""Jobs that are stopped, killed, and go on with another number of ranks."""

from pathlib import Path

import pytest

from examples import checkpoints
from tests.adapters import elastic_workers as workers
from tests.adapters.tiny_models import tiny
from tests.ranks import run_ranks

KILLED = "the rank was killed or hung"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of weights of a small model whose experts two and three ranks divide."""
    folder = tmp_path_factory.mktemp("weights")
    tiny("Qwen3Moe", vocab_size=256, num_experts=12, max_position_embeddings=128).save_pretrained(
        folder
    )
    return folder


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_job_that_sigterm_ends_on_two_ranks_goes_on_with_the_same_losses_on_three(
    tmp_path: Path, weights: Path
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    assert run_ranks(workers.train, 2, whole, weights, 6) == [""] * 2
    assert run_ranks(workers.train, 2, stopped, weights, 6, 3) == [""] * 2
    assert list(workers.losses_in(stopped)) == [1, 2, 3]
    assert run_ranks(workers.train, 3, stopped, weights, 6) == [""] * 3
    losses, wanted = workers.losses_in(stopped), workers.losses_in(whole)
    assert list(losses) == list(wanted) == [1, 2, 3, 4, 5, 6]
    for step, loss in wanted.items():
        assert losses[step] == pytest.approx(loss, abs=1e-10, rel=0)
    output = (stopped / "output").read_text()
    assert "resumed step 3 on 3 ranks\n" in output


def test_ranks_that_a_rank_leaves_name_the_collective(weights: Path) -> None:
    assert run_ranks(workers.lose_a_rank, 3, weights) == ["", "", KILLED]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_rank_that_is_killed_in_a_save_leaves_the_checkpoint_before(
    tmp_path: Path, weights: Path
) -> None:
    reports = run_ranks(workers.lose_a_rank_in_a_save, 3, tmp_path, weights)
    assert reports == ["", "", KILLED]
    assert checkpoints.newest(tmp_path) == 1
    assert (tmp_path / "step-2").exists()


@pytest.mark.parametrize("method", ["backward", "total_loss"])
def test_stages_that_a_rank_leaves_name_the_collective(method: str) -> None:
    assert run_ranks(workers.lose_a_stage, 3, method) == ["", "", KILLED]
