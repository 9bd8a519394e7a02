"""Adapted models against transformers' own, on real ranks."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import layer_passes
from tests.adapters import workers
from tests.adapters.tiny_models import FAMILIES
from tests.ranks import run_ranks

THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_equals_the_model(family: str) -> None:
    workers.equal_models([family], (1, 3), ("none", "S2"))


def test_one_rank_equals_a_llama_with_one_expert_for_each_token() -> None:
    workers.equal_models(["Llama4"], (3,), ("none", "S2"), num_experts_per_tok=1)


@pytest.mark.parametrize(("family", "backend"), [
    ("Llama4", "eager"), pytest.param("Glm4Moe", "aot_eager", marks=THOROUGH),
    pytest.param("Qwen2Moe", "eager", marks=THOROUGH),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # asked for by the compiler
def test_a_compiled_block_is_one_graph_with_the_models_numbers(family: str, backend: str) -> None:
    workers.compiles_blocks(family, backend)


def test_one_rank_fills_a_model_from_a_checkpoint(tmp_path: Path) -> None:
    workers.loads(str(tmp_path), ["Qwen3Moe"])


def test_faults_are_refused_on_one_rank() -> None:
    workers.refuses()


# One start of the ranks for all that they show: they import transformers.
@pytest.mark.parametrize(("worker", "num_ranks"), [
    (workers.two_ranks, 2), pytest.param(workers.more_families, 2, marks=THOROUGH),
    pytest.param(workers.four_ranks, 4, marks=THOROUGH),
])  # fmt: skip
def test_ranks_equal_the_model_train_save_load_and_refuse(
    worker: Callable[[str], None], num_ranks: int, tmp_path: Path
) -> None:
    assert run_ranks(worker, num_ranks, str(tmp_path)) == [""] * num_ranks


def test_transformers_is_loaded_by_the_user_alone() -> None:
    code = "import moetune, sys; moetune.adapt; sys.exit('transformers' in sys.modules)"
    subprocess.run((sys.executable, "-c", code), check=True)


@pytest.mark.thorough
def test_rows_are_passed_over_less_often_than_by_grouped_kernels_of_transformers() -> None:
    theirs, ours = layer_passes.count().values()
    assert theirs[0]["d_model"] == pytest.approx(6.25)  # as their lines say
    assert [phase["d_model"] for phase in ours] == pytest.approx([2.25, 3.0])
    for other, phase in zip(theirs, ours, strict=True):
        assert layer_passes.together(phase) < layer_passes.together(other)
