"""Routing recorded by training layers, on real ranks, against counts made by hand."""

import pytest
import torch

from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.moe.loads import MOST_STEPS, LoadRecorder
from tests.ranks import run_ranks
from tests.runtime import routing_workers

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(("ranks", "degree"), [(2, 1), (2, 3), (3, 2)])
def test_a_record_has_what_the_gates_chose(ranks: int, degree: int) -> None:
    assert run_ranks(routing_workers.record_what_gates_choose, ranks, degree) == [""] * ranks


def test_a_tensor_parallel_layer_records_its_experts() -> None:
    assert run_ranks(routing_workers.record_in_a_tensor_group, 2) == [""] * 2


def test_one_rank_records_alone() -> None:
    layer = MoELayer(8, 16, 4, 2)
    layer(torch.randn(6, 8))
    found = layer.routing_record()
    assert sum(found.loads) == 12
    assert found.fullest_p99 == 1.0


def test_only_the_newest_steps_are_remembered_one_by_one() -> None:
    recorder = LoadRecorder(2)
    for _ in range(MOST_STEPS + 5):
        recorder.add([[1, 0], [2, 3]])
    layer = MoELayer(8, 16, 2)
    found = recorder.record(layer.communicator, top_k=1)
    assert found.loads == (3 * (MOST_STEPS + 5), 3 * (MOST_STEPS + 5))
    assert found.num_steps == MOST_STEPS
