"""Stages and data-parallel gradients on a GPU wait for their sums."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import moetune
from moetune.comm.agree import vote
from moetune.comm.gloo import communicator_of
from moetune.domain.training import FoldedLayout
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.parallel.groups import join
from moetune.runtime.parallel.stages import Shapes, Stages
from tests.cuda_kit import FakeCuda
from tests.runtime.gpu_runs import GPU, NCCL, on_every_rank

WIDTH = 8


def test_stages_wait_for_the_gradients_of_all_replicas() -> None:
    def program(_: FakeCuda) -> None:
        torch.cuda.set_device(GPU)
        layout = FoldedLayout(dp=2, ep=2, micro_batch=2, zero=0)
        ranks = join(layout, device_type="cuda")
        part = nn.Sequential(nn.Linear(WIDTH, WIDTH), MoELayer(WIDTH, WIDTH, 4, mesh=ranks.spread))
        rows = torch.empty(4, WIDTH, device="meta")
        stages = Stages(
            [part.to(GPU)], ranks, loss_of=lambda y, wanted: (y - wanted).square().mean(),
            shapes=Shapes(inputs=rows, between=rows, outputs=rows),
        )  # fmt: skip
        x = torch.randn(4, WIDTH, device=GPU)
        for _number in range(2):
            share = stages.backward(x, x)
            for parameter in stages.parts.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(2)
            stages.total_loss(share)

    on_every_rank(program)


def _prepared(cuda: FakeCuda, replicas: bool) -> nn.Module:  # noqa: FBT001 - one of two
    """Return a model whose experts are spread over two ranks, with and without replicas."""
    rank = dist.get_rank()
    mesh = None
    if replicas:
        rows = torch.arange(4).view(2, 2)
        groups = [
            dist.new_group(rows[:, rank % 2].tolist()),
            dist.new_group(rows[rank // 2].tolist()),
        ]
        names = "replicas", "experts"
        mesh = DeviceMesh.from_group(groups, "cuda", mesh=rows, mesh_dim_names=names)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), MoELayer(WIDTH, WIDTH, 4, mesh=mesh))
    assert cuda.faults == []
    return moetune.prepare_ddp(model.to(GPU))


def _neighbours(value: Any, mine: int, other: int) -> Any:
    """Say which two ranks share a rank's experts."""
    is_pair = value == (mine // 2 * 2, mine // 2 * 2 + 1)
    return (other // 2 * 2, other // 2 * 2 + 1) if is_pair else value


@pytest.mark.parametrize("replicas", [False, True])
def test_experts_gradients_are_means_when_their_sums_have_arrived(*, replicas: bool) -> None:
    def program(cuda: FakeCuda) -> None:
        torch.cuda.set_device(GPU)
        model = _prepared(cuda, replicas)
        for _ in range(2):
            model(torch.randn(6, WIDTH, device=GPU)).square().sum().backward()
            assert float(moetune.clip_grad_norm_(model, 1e-3)) > 0

    on_every_rank(program, num_ranks=4 if replicas else 2, says=_neighbours, backends=NCCL)


Asked = Callable[[Any], Any]


@pytest.mark.parametrize(
    "ask",
    [
        lambda group: vote(group, True, "a vote")(),  # noqa: FBT003 - a vote is its one value
        lambda group: group.all_reduce_values(torch.ones(2), "a sum").tolist(),
        lambda group: group.all_gather_values(torch.ones(2, device=GPU), "values").tolist(),
        lambda group: group.all_to_all_blocks(torch.ones(2, 1, device=GPU), "blocks").tolist(),
    ],
)
@pytest.mark.parametrize("backends", [NCCL, {"cpu": "gloo", "cuda": "nccl"}])
def test_what_returns_a_value_has_waited_for_it(ask: Asked, backends: dict[str, str]) -> None:
    def program(_: FakeCuda) -> None:
        torch.ones(1, device=GPU)
        torch.cuda.set_device(GPU)
        ask(communicator_of(None))

    on_every_rank(program, backends=backends)
