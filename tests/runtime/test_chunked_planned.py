"""`moetune.shard(plan=…)`: the plan's chunks, or an error on all ranks alike."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moetune
from examples.language_model import LanguageModel
from moetune.comm.group import OneRank
from moetune.domain.layer import LayerShape
from moetune.domain.model import read_shape
from moetune.domain.training_document import TrainingDocument
from tests.ranks import run_ranks, single_rank_group
from tests.runtime.plans import small_plan

SIZES: dict[str, Any] = {
    "d_model": 512, "d_hidden": 2048, "num_layers": 4, "num_heads": 4, "seq": 32, "vocab": 8000,
    "profile": "a100-x4", "global_batch": 8, "micro_batch": 1, "tp": 1, "pp": 1, "ep": 1,
    "save": False,
}  # fmt: skip


@cache
def planned(ranks: int = 1, num_experts: int = 4, **pins: Any) -> TrainingDocument:
    pins = {"zero": 3, "offload_optimizer": 1.0, **pins}
    view: Any = moetune.plan(
        **SIZES, moe_every=2, num_experts=num_experts, world_size=ranks, **pins
    )
    plan = view.plan
    assert isinstance(plan, TrainingDocument)
    return plan


def model_of(plan: TrainingDocument, **changes: Any) -> nn.Module:
    """Return the plan's model, with experts of a rank's own."""
    whole = read_shape(plan.inputs.model)
    assert whole is not None
    shape = replace(whole, moe=whole.moe, **changes)
    moe = shape.moe
    model = LanguageModel(
        shape,
        lambda: moetune.MoELayer(
            moe.d_model, moe.d_hidden, moe.num_experts, moe.top_k, communicator=OneRank()
        ),
    )
    return model.to(torch.bfloat16)  # as planned


def shard(model: nn.Module, **options: Any) -> None:
    moetune.shard(model, torch.optim.SGD(model.parameters()), **options)


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    with single_rank_group():
        yield


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_plan_and_its_file_give_chunks_cache_and_offload() -> None:
    plan = planned()
    chosen = plan.chunks
    assert chosen is not None
    assert chosen.offload
    Path("plan.json").write_text(plan.text, encoding="utf-8")
    for source in (plan, "plan.json", Path("plan.json")):
        model = model_of(plan)
        shard(model, plan=source)
        chunks = moetune.model_chunks(model)
        largest = max(chunk.num_bytes for chunk in chunks.chunks)
        assert chunks.capacity == chosen.cache_bytes // largest >= 2
        model(torch.arange(2).view(1, 2)).square().mean().backward()
        assert chunks.num_gathers >= len(chunks.chunks)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: small_plan(layer=LayerShape(d_model=8, d_hidden=16, num_experts=4)),
         "is the plan of a layer, and a whole model"),
        (lambda: planned(zero=1, offload_optimizer=0.0), "has no chunks: its states are not"),
        (lambda: planned(ranks=2), "shards over 2 ranks, the data-parallel group has 1"),
        (lambda: "missing.json", "missing.json cannot be read"),
        (Path, "cannot be read: Is a directory"),
        (lambda: 7, "7 is neither the plan"),
    ],
)  # fmt: skip
def test_a_plan_without_chunks_for_these_ranks_is_refused(
    make: Callable[[], Any], words: str
) -> None:
    with pytest.raises(moetune.InputError, match=words):
        shard(model_of(planned()), plan=make())


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (lambda: nn.Linear(4, 4), {}, r"for [\d,]+ parameters, this model has 20"),
        (lambda: model_of(planned(), num_layers=2), {}, r"for [\d,]+ parameters, this model"),
        (lambda: model_of(planned(), vocab_size=90_000), {}, r"for [\d,]+ parameters, this model"),
        (lambda: model_of(planned()), {"offload": True}, "and other options of chunks are given"),
    ],
)
def test_a_plan_for_another_model_or_with_other_options_is_refused(
    make: Callable[[], nn.Module], options: dict[str, Any], words: str
) -> None:
    model = make()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(moetune.InputError, match=words):
        shard(model, plan=planned(), **options)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before


def _wrong_on_one_rank(plan: TrainingDocument, alone: TrainingDocument) -> None:
    is_wrong = dist.get_rank() == 1
    wrong: list[tuple[Any, str]] = [
        (
            small_plan(layer=LayerShape(d_model=8, d_hidden=16, num_experts=4)),
            "is the plan of a layer",
        ),
        (alone, "shards over 1 rank"),
        ("missing.json", "missing.json cannot be read"),
    ]
    for other, words in wrong:
        with pytest.raises(moetune.RankMismatchError, match=words):
            shard(model_of(plan), plan=other if is_wrong else plan)
    with pytest.raises(moetune.RankMismatchError, match="chunk_bytes must be"):
        shard(model_of(plan), chunk_bytes=0 if is_wrong else 2**20)
    # Equal chunks of different plans: the ranks would run other steps than either says.
    another = replace(plan, id="ab" * 32)
    with pytest.raises(moetune.RankMismatchError, match="rank 1: .*" + another.id):
        shard(model_of(plan), plan=another if is_wrong else plan)
    with pytest.raises(moetune.InputError, match="is the plan of a layer"):
        shard(model_of(plan), plan=wrong[0][0])
    shard(model_of(plan), plan=plan)


@pytest.mark.dist
def test_no_rank_waits_for_a_rank_that_has_another_plan() -> None:
    assert run_ranks(_wrong_on_one_rank, 2, planned(ranks=2), planned(), timeout_seconds=60) == [
        "",
        "",
    ]
