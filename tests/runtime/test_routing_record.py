"""Routing recorded by training layers, on real ranks, against counts made by hand."""

import pytest
import torch
import torch.distributed as dist

from moetune.domain.errors import InputError
from moetune.runtime.moe.layer import MoELayer, TensorExpertLayer
from moetune.runtime.moe.loads import MOST_STEPS, LoadRecorder
from tests.ranks import run_ranks


def record_what_gates_choose(degree: int) -> None:
    """Compare the record with choices that are made and counted here, step by step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    layer = MoELayer(8, 16, 2 * ranks, 2, pipeline=degree)
    with pytest.raises(InputError, match="no step was recorded"):
        layer.routing_record()
    counted, ratios = torch.zeros(2 * ranks, dtype=torch.int64), []
    for step, tokens in enumerate((5, 0, 40, 7)):
        torch.manual_seed(100 * step + rank)
        x = torch.randn(tokens + rank * (tokens > 0), 8, requires_grad=True)
        layer(x).sum().backward()
        chosen = (x @ layer.gate.weight.T).topk(2).indices.flatten()
        counts = torch.bincount(chosen, minlength=2 * ranks)
        dist.all_reduce(counts)
        counted += counts
        rows = counts.view(ranks, 2).sum(1)
        if rows.sum():
            ratios.append(float(rows.max()) / float(rows.float().mean()))
    layer.eval()
    layer(torch.randn(9, 8))
    layer.train()
    with torch.no_grad():
        layer(torch.randn(9, 8))
    record = layer.routing_record()
    assert record.loads == tuple(counted.tolist())
    assert (record.num_steps, record.num_ranks, record.top_k) == (4, ranks, 2)
    assert record.fullest_p99 == pytest.approx(max(ratios), rel=1e-6)
    assert record.fullest_p50 == pytest.approx(sorted(ratios)[1], rel=1e-6)
    layer.forget_routing()
    layer(torch.randn(3, 8))
    assert layer.routing_record().num_steps == 1
    if rank == 0:
        layer.forget_routing()
    with pytest.raises(InputError, match="ranks recorded from 0 to 1 steps"):
        layer.routing_record()


def record_in_a_tensor_group() -> None:
    """Tokens are equal on all ranks, and each counts the rows of its own experts."""
    ranks = dist.get_world_size()
    torch.manual_seed(2)
    layer = TensorExpertLayer(8, 16, 2 * ranks, 2)
    torch.manual_seed(3)
    x = torch.randn(20, 8, requires_grad=True)
    for _ in range(3):
        layer(x).sum().backward()
    chosen = (x @ layer.gate.weight.T).topk(2).indices.flatten()
    counts = 3 * torch.bincount(chosen, minlength=2 * ranks)
    assert layer.routing_record().loads == tuple(counts.tolist())


pytestmark = pytest.mark.dist


@pytest.mark.parametrize(("ranks", "degree"), [(2, 1), (2, 3), (3, 2)])
def test_a_record_has_what_the_gates_chose(ranks: int, degree: int) -> None:
    assert run_ranks(record_what_gates_choose, ranks, degree) == [""] * ranks


def test_a_tensor_parallel_layer_records_its_experts() -> None:
    assert run_ranks(record_in_a_tensor_group, 2) == [""] * 2


def test_one_rank_records_alone() -> None:
    layer = MoELayer(8, 16, 4, 2)
    layer(torch.randn(6, 8))
    record = layer.routing_record()
    assert sum(record.loads) == 12
    assert record.fullest_p99 == 1.0


def test_only_the_newest_steps_are_remembered_one_by_one() -> None:
    recorder = LoadRecorder(2)
    for _ in range(MOST_STEPS + 5):
        recorder.add([[1, 0], [2, 3]])
    layer = MoELayer(8, 16, 2)
    record = recorder.record(layer.communicator, top_k=1)
    assert record.loads == (3 * (MOST_STEPS + 5), 3 * (MOST_STEPS + 5))
    assert record.num_steps == MOST_STEPS
