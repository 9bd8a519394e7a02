"""Tensor-parallel layers, stages and data-parallel gradients on a GPU wait for their sums."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moetune
from moetune.comm.agree import vote
from moetune.comm.gloo import communicator_of
from moetune.domain import buckets
from moetune.domain.layout import Layout
from moetune.domain.training import FoldedLayout
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.parallel.block import Attention, FeedForward, TransformerBlock
from moetune.runtime.parallel.groups import ParallelGroups, join
from moetune.runtime.parallel.stages import Shapes, Stages
from moetune.runtime.parallel.tensor import ColumnParallelLinear
from moetune.runtime.parallel.vocabulary import (
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_parallel_cross_entropy,
)
from tests.cuda_kit import FakeCuda
from tests.cuda_kit.lanes import Operation
from tests.runtime.gpu_runs import GPU, NCCL, on_every_rank

WIDTH, VOCABULARY = 8, 10


def _products(done: Sequence[Operation]) -> list[Operation]:
    return [one for one in done if one.label in {"mm", "addmm"}]


class _Blocks(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _moe(ranks: ParallelGroups) -> MoELayer:
    return MoELayer(WIDTH, WIDTH, 4, group=ranks.experts)


def _block() -> TransformerBlock:
    group = communicator_of(None)
    return TransformerBlock(
        Attention(WIDTH, 2, group), FeedForward(WIDTH, 2 * WIDTH, group), WIDTH, balance=0.0
    )


def test_a_block_and_a_vocabulary_cut_over_ranks_wait_for_their_sums() -> None:
    def program(_: FakeCuda) -> None:
        group = communicator_of(None)
        embedding = VocabParallelEmbedding(VOCABULARY, WIDTH, group)
        block, head = _block(), VocabParallelHead(WIDTH, VOCABULARY, group)
        nn.ModuleList([embedding, block, head]).to(GPU)
        tokens_BS = torch.arange(8, device=GPU).view(2, 4)
        for _number in range(2):
            logits_TW = head(block(embedding(tokens_BS))).flatten(0, 1)
            losses_T = vocab_parallel_cross_entropy(
                logits_TW, tokens_BS.flatten(), vocab_size=VOCABULARY, communicator=group
            )
            losses_T.sum().backward()

    on_every_rank(program, backends=NCCL)


def test_the_sum_of_an_inputs_gradient_travels_beside_the_weights_gradient() -> None:
    def program(cuda: FakeCuda) -> None:
        layer = ColumnParallelLinear(WIDTH, 2 * WIDTH, communicator_of(None)).to(GPU)
        x = torch.randn(4, WIDTH, device=GPU, requires_grad=True)
        y = layer(x)
        before = len(cuda.operations)
        y.backward(torch.ones_like(y))
        backward = cuda.operations[before:]
        (travel,) = (one for one in backward if one.label.startswith("all_reduce"))
        products = [one for one in backward if one.label.startswith("mm")]
        assert [one.start_seconds < travel.start_seconds for one in products] == [True, False]
        assert products[1].end_seconds <= travel.end_seconds

    on_every_rank(program, backends=NCCL)


def test_stages_wait_for_the_gradients_of_all_replicas() -> None:
    def program(_: FakeCuda) -> None:
        torch.cuda.set_device(GPU)
        layout = Layout(pp=1, dp=2, tp=1, ep=2, expert_parallel="all_to_all")
        ranks = join(layout, device_type="cuda")
        part = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), MoELayer(WIDTH, WIDTH, 4, group=ranks.experts)
        )
        rows = torch.empty(4, WIDTH, device="meta")
        stages = Stages(
            [part.to(GPU)], ranks, loss_of=lambda y, wanted: (y - wanted).square().mean(),
            shapes=Shapes(inputs=rows, between=rows, outputs=rows), num_micro_batches=2,
        )  # fmt: skip
        x = torch.randn(4, WIDTH, device=GPU)
        for _number in range(2):
            share = stages.backward(x, x)
            for parameter in stages.parts.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(2)
            stages.total_loss(share)

    on_every_rank(program)


def test_shards_are_gathered_before_their_blocks_run_and_gradients_reduced_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def program(cuda: FakeCuda) -> None:
        torch.cuda.set_device(GPU)
        ranks = join(FoldedLayout(dp=2, ep=2, micro_batch=2, zero=1), device_type="cuda")
        part = _Blocks([nn.Linear(WIDTH, WIDTH), _moe(ranks), nn.Linear(WIDTH, WIDTH)])
        rows = torch.empty(4, WIDTH, device="meta")
        stages = Stages(
            [part.to(GPU)], ranks, loss_of=lambda y, wanted: (y - wanted).square().mean(),
            shapes=Shapes(inputs=rows, between=rows, outputs=rows),
        )  # fmt: skip
        optimizer = stages.optimizer(lambda parts: torch.optim.SGD(parts, lr=0.1))
        x = torch.randn(4, WIDTH, device=GPU)
        before = 0
        for _number in range(3):
            before = len(cuda.operations)
            stages.backward(x, x)
            done = cuda.operations[before:]
            reduced = next(one for one in done if one.label.startswith("reduce_scatter"))
            assert any(one.start_seconds > reduced.start_seconds for one in _products(done))
            before = len(cuda.operations)
            optimizer.step()
        *_, gathered = (
            one for one in cuda.operations[before:] if one.label.startswith("all_gather")
        )
        before = len(cuda.operations)
        stages.backward(x, x)
        assert _products(cuda.operations[before:])[0].start_seconds < gathered.end_seconds

    monkeypatch.setattr(buckets, "LEAST_BUCKET_BYTES", 1)
    on_every_rank(program)


def _prepared(cuda: FakeCuda, replicas: bool) -> nn.Module:  # noqa: FBT001 - one of two
    """Return a model whose experts are spread over two ranks, with and without replicas."""
    first = dist.get_rank() // 2 * 2
    group = dist.new_group([first, first + 1]) if replicas else None
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), MoELayer(WIDTH, WIDTH, 4, group=group))
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
        lambda group: group.all_gather_rows(torch.ones(2, 2, device=GPU), [2, 2], "rows").tolist(),
        lambda group: group.all_gather_values(torch.ones(2, device=GPU), "values").tolist(),
        lambda group: group.all_to_all_blocks(torch.ones(2, 1, device=GPU), "blocks").tolist(),
        lambda group: [one.tolist() for one in group.gather(torch.ones(2, device=GPU), "it")],
    ],
)
@pytest.mark.parametrize("backends", [NCCL, {"cpu": "gloo", "cuda": "nccl"}])
def test_what_returns_a_value_has_waited_for_it(ask: Asked, backends: dict[str, str]) -> None:
    def program(_: FakeCuda) -> None:
        torch.ones(1, device=GPU)
        torch.cuda.set_device(GPU)
        ask(communicator_of(None))

    on_every_rank(program, backends=backends)
