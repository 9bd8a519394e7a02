"""Adapted models against transformers' own, on real ranks."""

import subprocess
import sys
from pathlib import Path

import pytest

import moetune
from tests.adapters import workers
from tests.adapters.tiny_models import FAMILIES
from tests.ranks import run_ranks


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_equals_the_model(family: str) -> None:
    workers.equal_models([family], ((1, 3), (3, 2)), ("none", "S2"))


def test_one_rank_fills_a_model_from_a_checkpoint(tmp_path: Path) -> None:
    workers.loads(str(tmp_path), ["Qwen3Moe"])


def test_faults_are_refused_on_one_rank() -> None:
    workers.refuses()


# One start of the ranks for all that they show: they import transformers.
def test_two_ranks_equal_the_model_train_save_load_and_refuse(tmp_path: Path) -> None:
    assert run_ranks(workers.two_ranks, 2, str(tmp_path)) == [""] * 2


def test_four_ranks_equal_the_model_and_reshard_with_and_without_replicas(tmp_path: Path) -> None:
    assert run_ranks(workers.four_ranks, 4, str(tmp_path)) == [""] * 4


def test_transformers_is_loaded_by_the_user_alone() -> None:
    code = "import moetune, sys; moetune.adapt; sys.exit('transformers' in sys.modules)"
    subprocess.run((sys.executable, "-c", code), check=True)


def test_an_older_transformers_has_no_expert_parallelism_to_register_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    with pytest.raises(moetune.InputError, match=r"5\.23 or newer"):
        moetune.register_expert_parallel()
