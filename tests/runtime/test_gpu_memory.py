"""Memory beside a GPU's own: what torch takes for page-locked buffers, and on other devices."""

import random

import pytest
import torch

from moetune.comm.group import OneRank
from moetune.domain.constraints import Strategy
from moetune.domain.layer import LayerShape, Workload
from moetune.domain.units import pinned_bytes
from moetune.runtime.moe.pairs import dots
from moetune.runtime.moe.workspace import empty
from moetune.solve.layer.peak import peak_bytes
from tests.cuda_kit import FakeCuda
from tests.runtime.gpu_runs import GPU, decision, moe_layer


def test_page_locked_memory_is_taken_in_powers_of_two() -> None:
    assert [pinned_bytes(size) for size in (0, 1, 2, 3, 4, 5, 2**20, 2**20 + 1)] == [
        0, 1, 2, 4, 4, 8, 2**20, 2**21,
    ]  # fmt: skip


@pytest.mark.parametrize("strategy", ["S1", "S2", "S3"])
def test_the_host_memory_of_a_layer_is_what_its_plan_says(strategy: Strategy) -> None:
    workload = Workload(
        layer=LayerShape(d_model=8, d_hidden=16, num_experts=4, top_k=2), world_size=1,
        tokens_per_rank=25,
    )  # fmt: skip
    with FakeCuda() as cuda:
        layer = moe_layer(communicator=OneRank())
        layer.pin(decision(strategy))
        y = layer(torch.randn(25, 8, device=GPU, requires_grad=True))
        (pinned,) = [buffer for buffer in cuda.tensors.buffers if buffer.is_pinned]
        y.sum().backward()
    peak = peak_bytes(workload=workload, degree=4, strategy=strategy, is_grouped=False)
    assert pinned.num_bytes == pinned_bytes(peak.host_bytes)


def test_numbers_of_rows_that_follow_the_routing_ask_for_few_sizes() -> None:
    draw = random.Random(0)
    numbers = [draw.randint(28_000, 37_000) for _ in range(100)]
    with FakeCuda():
        on_gpu, on_host = torch.empty(0, device=GPU), torch.empty(0)
        sizes = [_room(rows, on_gpu) for rows in numbers]
        assert len(set(sizes)) <= 5
        assert all(rows <= size <= 1.13 * rows for rows, size in zip(numbers, sizes, strict=True))
        assert [_room(rows, on_host) for rows in numbers] == numbers
        assert [_room(rows, on_gpu) for rows in (0, 1, 33, 1023, 32768)] == [
            0, 1, 33, 1023, 32768,
        ]  # fmt: skip


def _room(rows: int, like: torch.Tensor) -> int:
    made = empty("rows", (rows, 8), like)
    assert made.shape == (rows, 8)
    return made.untyped_storage().nbytes() // (8 * 4)


def test_dot_products_on_a_device_of_another_kind_have_a_gpus_blocks() -> None:
    rows = torch.empty(5, 16, device="meta")  # any that is neither
    dots(rows.unsqueeze(1), rows, torch.empty(5, 1, device="meta"))
