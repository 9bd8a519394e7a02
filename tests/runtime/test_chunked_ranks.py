"""Sharded training on several ranks ends where plain training on all batches ends."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import moetune
from examples import checkpoints
from moetune.comm.group import OneRank
from tests.ranks import run_ranks
from tests.runtime import chunked_models as models
from tests.runtime.chunked_workers import (
    CHUNK_BYTES,
    EXACT,
    Case,
    check_equals_mixed_precision,
    check_equals_plain,
    exact_loss_of,
    sharded,
    step_sharded,
    whole_state,
)

TOKENS = torch.arange(10).view(2, 5)


ZOO: dict[str, Callable[[], torch.nn.Module]] = {
    "plain": models.Plain,
    "tied": models.Tied,
    "called twice": models.Twice,
    "backwards": models.Backwards,
    "frozen": models.Frozen,
    "checkpointed": lambda: models.Checkpointed(use_reentrant=False),
    "attention": models.Attentive,
}


def _every_model(num_kinds: int) -> None:
    for number, (name, make) in enumerate(ZOO.items()):
        for places, offload in ((2, False), (3, True), (2, False))[number % 2 :][:num_kinds]:
            case = Case(make=make, places=places, options={"offload": offload})
            check_equals_plain(case, f"{name}, offload {offload}")
    everything = check_equals_plain(Case(make=models.Plain, steps=12 * num_kinds), "all cached")
    assert everything.capacity > 3
    check_equals_plain(Case(make=models.Plain, places=2, steps=25 * num_kinds), "two")
    check_equals_plain(Case(make=models.Tied, places=2, micro_batches=2, max_norm=0.1), "tied")
    check_equals_plain(Case(make=models.Twice, places=3, evaluates=True), "twice")
    check_equals_plain(Case(make=models.Backwards, places=2, max_norm=0.1), "backwards")
    check_equals_plain(Case(make=models.Attentive, places=2, chunk_bytes=10**6), "fused")
    for options in ({}, {"offload": True}):
        check_equals_mixed_precision(options)


def _gradients_that_tell(num_kinds: int) -> None:
    """SGD, because Adam's step is the same for gradients that are all too large."""
    plainly: dict[str, Any] = {"optimizer": torch.optim.SGD, "settings": {"lr": 0.5}}
    for make in (models.Tied, models.Plain):
        check_equals_plain(Case(make=make, max_norm=0.1, **plainly), f"{make.__name__} clipped")
    fused = Case(make=models.Attentive, places=2, chunk_bytes=10**6, max_norm=0.1, **plainly)
    check_equals_plain(fused, "fused and clipped")
    # Nothing waits between the last micro-batch and the step for what is still on its way.
    for options in ({}, {"offload": True})[:num_kinds]:
        case = Case(make=models.Plain, micro_batches=3, options=options, **plainly)
        check_equals_plain(case, f"three micro-batches, {options}")


@pytest.mark.parametrize(("worker", "num_ranks", "num_kinds"), [
    pytest.param(_every_model, 1, 2, marks=pytest.mark.thorough), (_every_model, 2, 1),
    pytest.param(_every_model, 2, 2, marks=pytest.mark.thorough),
    (_gradients_that_tell, 1, 2), (_gradients_that_tell, 2, 2),
])  # fmt: skip
def test_ranks_end_where_plain_training_ends(
    worker: Callable[[int], None], num_ranks: int, num_kinds: int
) -> None:
    assert run_ranks(worker, num_ranks, num_kinds) == [""] * num_ranks


def _make_layer(mesh: DeviceMesh | None) -> moetune.MoELayer:
    return moetune.MoELayer(8, 16, 4, 2, mesh=mesh, pipeline=2, dtype=torch.float64)


def _pairs() -> DeviceMesh:
    """Return two replicas of experts over pairs of ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "experts"))


def _make_local_layer() -> moetune.MoELayer:
    return moetune.MoELayer(8, 16, 4, 2, communicator=OneRank(), pipeline=2, dtype=torch.float64)


def _experts() -> None:
    mine = _pairs()
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
        assert sum("experts" in chunk.units[0].name for chunk in chunks.chunks) == 2
    chunks = check_equals_plain(
        Case(
            make=lambda: models.Sparse(lambda: _make_layer(None)),
            make_twin=lambda: models.Sparse(_make_local_layer),
            places=4,
            chunk_bytes=4096,
        ),
        "experts over all ranks",
    )
    assert not any("experts" in chunk.units[0].name for chunk in chunks.chunks)


@pytest.mark.dist
def test_data_and_expert_parallel_together() -> None:
    assert run_ranks(_experts, 4) == [""] * 4


def _make_reusing_layer(mesh: DeviceMesh) -> moetune.MoELayer:
    """Return a layer that keeps rows on the host and computes hidden ones again."""
    return moetune.MoELayer(
        8, 16, 4, 2, mesh=mesh, pipeline=2, memory_reuse="S1", dtype=torch.float64
    )


def _inside_tensor_groups() -> None:
    """Two replicas of a tensor-parallel pair; chunks are shared by ranks 0, 2 and 1, 3."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = mesh.get_group("dp")

    def make() -> models.Sparse:
        return models.Sparse(
            lambda: moetune.TensorExpertLayer(8, 16, 4, 2, mesh=mesh, dtype=torch.float64)
        )

    torch.manual_seed(0)
    model = make().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options: dict[str, Any] = {"chunk_bytes": 4096, "cache_bytes": 4 * 4096, "group": mine}
    sharded_model, stepper = moetune.shard(model, optimizer, **options)
    start = whole_state(sharded_model)
    texts = torch.arange(4 * 2 * 6).view(4, 2, 6) % models.VOCABULARY
    for text in texts:
        exact_loss_of(sharded_model, text[dist.get_rank() // 2][None]).backward()
        stepper.step()
        stepper.zero_grad()
    end = whole_state(sharded_model)
    if not end:
        return
    twin = models.Sparse(_make_local_layer).double()
    twin.load_state_dict(start)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for text in texts:
        for some in text:
            (exact_loss_of(twin, some[None]) / len(text)).backward()
        plain.step()
        plain.zero_grad()
    for name, wanted in twin.state_dict().items():
        torch.testing.assert_close(end[name], wanted, rtol=0, atol=EXACT, msg=name)


def _other_layers() -> None:
    mine = _pairs()
    check_equals_plain(
        Case(
            make=lambda: models.Sparse(lambda: _make_reusing_layer(mine)),
            make_twin=lambda: models.Sparse(_make_local_layer),
            places=4,
            chunk_bytes=4096,
            options={"offload": True},
        ),
        "rows on the host",
    )
    _inside_tensor_groups()


@pytest.mark.dist
def test_layers_that_reuse_memory_and_tensor_parallel_experts_in_chunks() -> None:
    assert run_ranks(_other_layers, 4) == [""] * 4


def _save(folder: str) -> None:
    mine = _pairs()
    case = Case(make=lambda: models.Sparse(lambda: _make_layer(mine)), chunk_bytes=4096)
    model, optimizer = sharded(case)
    for step in range(3):
        step_sharded(case, step, model, optimizer)
    checkpoints.save(Path(folder), 3, model, optimizer)
    whole = whole_state(model)
    if whole:
        torch.save(whole, f"{folder}/whole.pt")
    _two_more_steps(model, optimizer)
    whole = whole_state(model)
    if whole:
        torch.save(whole, f"{folder}/next.pt")


def _two_more_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Step on equal batches of all ranks."""
    for _ in range(2):
        exact_loss_of(model, TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()


def _load(folder: str) -> None:
    case = Case(make=lambda: models.Sparse(lambda: _make_layer(None)), chunk_bytes=6400)
    model, optimizer = sharded(case)
    checkpoints.load(Path(folder), checkpoints.newest(Path(folder)), model, optimizer)
    state = whole_state(model)
    for name, value in state.items():
        assert torch.equal(value, torch.load(f"{folder}/whole.pt")[name]), name
    _two_more_steps(model, optimizer)
    for name, value in whole_state(model).items():
        torch.testing.assert_close(
            value, torch.load(f"{folder}/next.pt")[name], rtol=0, atol=EXACT, msg=name
        )


@pytest.mark.dist
def test_a_checkpoint_in_shards_loads_at_another_number_of_ranks(tmp_path: Path) -> None:
    assert run_ranks(_save, 4, str(tmp_path)) == [""] * 4
    assert run_ranks(_load, 2, str(tmp_path)) == [""] * 2


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
    with pytest.raises(moetune.RankMismatchError, match="is not one of the model's"):
        moetune.shard(model, optimizer, chunk_bytes=CHUNK_BYTES)


class _EitherWayRound(torch.nn.Module):
    """Layers of one size, a chunk each; rank 1 calls them in the opposite order."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(models.VOCABULARY, 10)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(10, models.VOCABULARY if last else 10, bias=False)
            for last in (False, False, False, True)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        *inner, last = self.layers
        x = self.embedding(tokens)
        for layer in reversed(inner) if dist.get_rank() else inner:
            x = layer(x)
        logits: torch.Tensor = last(x)
        return logits


def _another_order() -> None:
    case = Case(make=_EitherWayRound, chunk_bytes=960)
    model, optimizer = sharded(case)
    with pytest.raises(moetune.RankMismatchError):
        step_sharded(case, 0, model, optimizer)


def _mismatches() -> None:
    _another_model()
    _another_order()


@pytest.mark.dist
def test_different_models_raise_on_all_ranks() -> None:
    assert run_ranks(_mismatches, 2) == ["", ""]
