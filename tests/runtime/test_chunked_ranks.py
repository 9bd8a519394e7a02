"""Sharded training on several ranks ends where plain training on all batches ends."""

import pytest
import torch
import torch.distributed as dist

import moetune
from moetune.runtime.links import LocalLink
from tests.ranks import run_ranks
from tests.runtime import chunked_models as models
from tests.runtime.chunked_workers import (
    CHUNK_BYTES,
    Case,
    check_equals_plain,
    sharded,
    step_sharded,
)


def _two_ranks() -> None:
    everything = check_equals_plain(Case(make=models.Plain, steps=50), "all cached")
    assert everything.num_places > 3
    check_equals_plain(Case(make=models.Plain, places=2, steps=50), "two places")
    check_equals_plain(Case(make=models.Plain, steps=50, options={"scatter": False}), "whole")
    check_equals_plain(Case(make=models.Plain, places=3, options={"offload": True}), "offloaded")
    check_equals_plain(Case(make=models.Tied, places=2, micro_batches=2, max_norm=0.1), "tied")
    check_equals_plain(Case(make=models.Twice, places=3, evaluates=True), "twice")
    check_equals_plain(Case(make=models.Frozen, places=2), "frozen")
    check_equals_plain(Case(make=models.Borrowing, places=2), "borrowing")
    check_equals_plain(Case(make=models.Attentive, places=2, chunk_bytes=10**6), "fused")


@pytest.mark.dist
def test_two_ranks_end_where_plain_training_ends() -> None:
    assert run_ranks(_two_ranks, 2) == ["", ""]


def _make_layer(group: dist.ProcessGroup | None) -> moetune.MoELayer:
    return moetune.MoELayer(8, 16, 4, 2, group=group, pipeline=2, dtype=torch.float64)


def _make_local_layer() -> moetune.MoELayer:
    return moetune.MoELayer(8, 16, 4, 2, link=LocalLink(), pipeline=2, dtype=torch.float64)


def _experts() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[dist.get_rank() // 2]
    for places, offload in ((None, False), (4, False), (5, True)):
        chunks = check_equals_plain(
            Case(
                make=lambda: models.Sparse(lambda: _make_layer(mine)),
                make_twin=lambda: models.Sparse(_make_local_layer),
                places=places,
                chunk_bytes=4096,
                max_norm=0.5,
                options={"offload": offload},
            ),
            f"experts over two of four ranks, {places} places",
        )
        assert {stored.team.num_ranks for stored in chunks.stored} == {2, 4}
    chunks = check_equals_plain(
        Case(
            make=lambda: models.Sparse(lambda: _make_layer(None)),
            make_twin=lambda: models.Sparse(_make_local_layer),
            places=4,
            chunk_bytes=4096,
        ),
        "experts over all ranks",
    )
    assert {stored.team.num_ranks for stored in chunks.stored} == {1, 4}


@pytest.mark.dist
def test_data_and_expert_parallel_together() -> None:
    assert run_ranks(_experts, 4) == [""] * 4


def _count(case: Case) -> tuple[int, int]:
    """Return the bytes that one rank communicates in a step, and the model's chunk bytes."""
    model, optimizer = sharded(case)
    chunks = moetune.model_chunks(model)
    before = chunks.traffic
    for step in range(3):
        before = chunks.traffic
        step_sharded(case, step, model, optimizer)
    chunks.settle()
    moved = chunks.traffic - before
    return moved.communicated_bytes, sum(chunk.num_bytes for chunk in chunks.chunks)


def _modes() -> None:
    whole, model_bytes = _count(Case(make=models.Plain, options={"scatter": False}))
    assert whole == 2 * model_bytes
    cached, model_bytes = _count(Case(make=models.Plain))
    assert cached == 2 * model_bytes
    small, model_bytes = _count(Case(make=models.Plain, places=2))
    assert small == 2 * model_bytes + 2 * CHUNK_BYTES


@pytest.mark.dist
def test_modes_communicate_what_ddp_zero_2_and_zero_3_do() -> None:
    assert run_ranks(_modes, 2) == ["", ""]


def _another_model() -> None:
    torch.manual_seed(0)
    model = models.Plain()
    if dist.get_rank() == 1:
        model.blocks[2].up = torch.nn.Linear(8, 17)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(
        moetune.RankMismatchError, match=r"rank 1: blocks\.2\.up\.weight: \(17, 8\)"
    ):
        moetune.shard(model, optimizer, chunk_bytes=CHUNK_BYTES)
    model = models.Plain()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(moetune.RankMismatchError, match=r"chunk_bytes=3201"):
        moetune.shard(model, optimizer, chunk_bytes=CHUNK_BYTES + dist.get_rank())
    others = model if dist.get_rank() else models.Plain()
    optimizer = torch.optim.SGD(others.parameters())
    error = moetune.RankMismatchError if dist.get_rank() else moetune.InputError
    with pytest.raises(error, match="is not one of the model's"):
        moetune.shard(model, optimizer, chunk_bytes=CHUNK_BYTES)


@pytest.mark.dist
def test_ranks_with_different_models_all_raise() -> None:
    assert run_ranks(_another_model, 2) == ["", ""]
