"""Grouped kernels: the numbers of the dense reference, and no stop of the host but one."""

import pytest
import torch

from moetune.domain.constraints import Strategy
from moetune.runtime.moe.layer import MoELayer
from tests.cuda_kit import FakeCuda, MirrorWorld
from tests.ranks import run_ranks
from tests.runtime import grouped_workers
from tests.runtime.gpu_runs import GPU, decision

SOME = ("gelu", "swiglu"), (1, 3, 4)


def test_the_definition_is_what_torch_computes_also_of_empty_groups() -> None:
    offs = torch.tensor([0, 16, 16, 40], dtype=torch.int32)
    x, y = torch.randn(40, 8), torch.randn(40, 16)
    for left, right in ((x, torch.randn(4, 8, 16)), (x.T, y)):
        wanted = grouped_workers.grouped_mm(left, right, offs=offs).nan_to_num(0)
        torch.testing.assert_close(torch._grouped_mm(left, right, offs=offs), wanted)


def test_every_activation_and_degree_equals_dense() -> None:
    grouped_workers.dense_matrix(("relu", "gelu", "silu", "swiglu"), (1, 2, 3, 8))


def test_reused_memory_equals_dense() -> None:
    grouped_workers.reuse_matrix(*SOME)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_with_uneven_tokens_equal_dense(num_ranks: int) -> None:
    found = run_ranks(grouped_workers.dense_matrix, num_ranks, *SOME)
    assert found == [""] * num_ranks


@pytest.mark.parametrize("degrees", [(1, 1), (4, 4), (4, 3)])
@pytest.mark.parametrize("strategy", ["none", "S1", "S4"])
@pytest.mark.parametrize(("activation", "capacity_factor"), [("gelu", None), ("swiglu", 0.7)])
def test_the_host_waits_once_forward_and_never_backward(
    strategy: Strategy, degrees: tuple[int, int], activation: str, capacity_factor: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    kernel, calls = torch._grouped_mm, list[int]()

    def grouped_mm(*args: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return kernel(*args, **options)

    monkeypatch.setattr(torch, "_grouped_mm", grouped_mm)
    with FakeCuda() as cuda, MirrorWorld(cuda, rank=1), grouped_workers.wider_products():
        layer = MoELayer(
            8, 16, 4, 2, activation=activation, capacity_factor=capacity_factor,  # type: ignore[arg-type] # of the grid
            device=GPU, dtype=torch.bfloat16,
        )  # fmt: skip
        layer.pin(decision(strategy, degrees))
        stops = []
        for num_tokens in (24, 24, 24, 17):
            x = torch.randn(num_tokens, 8).bfloat16().to(GPU).requires_grad_()
            begin = len(cuda.syncs)
            y = layer(x)
            middle = len(cuda.syncs)
            y.sum().backward()
            stops.append((cuda.syncs[begin:middle], cuda.syncs[middle:]))
    assert calls
    # The first call compares the layers before it exchanges what has their size.
    assert stops[0] == (["tolist", "tolist"], [])
    assert stops[1:] == [(["tolist"], [])] * 3
