"""`moetune.shard(plan=…)`: the plan's chunks, or an error on all ranks alike."""

from collections.abc import Callable
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
from moetune.domain.plan import Plan
from moetune.runtime.sharded.optimizer import ChunkedOptimizer
from moetune.workflows.files import plan_to_json
from tests.ranks import run_ranks
from tests.runtime.plans import small_plan
from tests.solve.test_chunk_plans import profile_of

SIZES: dict[str, Any] = {
    "d_model": 64, "d_hidden": 256, "num_layers": 4, "num_heads": 4, "seq": 32, "vocab": 1000,
    "tokens": 32, "dtype": "float32", "save": False,
}  # fmt: skip


@cache
def planned(ranks: int = 1, num_experts: int = 4, limit: str = "4MiB", **more: Any) -> Plan:
    return moetune.plan(
        **SIZES, moe_every=2, num_experts=num_experts, world_size=ranks, memory_limit=limit,
        profile=profile_of(num_devices=2), ep=1, **more,
    )  # type: ignore[return-value] # a paper's model has a Plan  # fmt: skip


def model_of(plan: Plan, **changes: Any) -> nn.Module:
    """Return the plan's model, with experts of a rank's own."""
    whole = plan.inputs.request.whole
    assert whole is not None
    shape = replace(whole, **changes)
    moe = shape.moe
    return LanguageModel(
        shape,
        lambda: moetune.MoELayer(
            moe.d_model, moe.d_hidden, moe.num_experts, moe.top_k, communicator=OneRank()
        ),
    )


def shard(model: nn.Module, **options: Any) -> ChunkedOptimizer:
    _, stepper = moetune.shard(model, torch.optim.SGD(model.parameters()), **options)
    assert isinstance(stepper, ChunkedOptimizer)
    return stepper


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_plan_and_its_file_give_chunks_cache_and_offload() -> None:
    plan = planned()
    chosen = plan.chunks
    assert chosen is not None
    assert chosen.offload
    Path("plan.json").write_text(plan_to_json(plan), encoding="utf-8")
    for one in (plan, "plan.json", Path("plan.json")):
        model = model_of(plan)
        shard(model, plan=one)
        chunks = moetune.model_chunks(model)
        sizes = [stored.chunk.num_bytes for stored in chunks.stored]
        assert max(sizes) <= chosen.chunk_bytes
        assert chunks.cache_capacity == chosen.cache_bytes // max(sizes)
        model(torch.arange(32).view(1, 32)).square().mean().backward()
        assert chunks.traffic.loaded_bytes > 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: small_plan(layer=LayerShape(d_model=8, d_hidden=16, num_experts=4)),
         "has no chunks: it is for one layer"),
        (lambda: planned(limit="40MiB"), "has no chunks: it is for a model whose states are kept"),
        (lambda: planned(ranks=2), "shards over 2 ranks, the data-parallel group has 1"),
        (lambda: "missing.json", "missing.json cannot be read"),
        (Path, "is a folder, not a plan"),
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
        (lambda: nn.Linear(4, 4), {}, "with 2 layers of experts, this one has 0"),
        (lambda: model_of(planned(num_experts=2)), {}, "with .*num_experts=4.* .*num_experts=2"),
        (lambda: model_of(planned(), vocab_size=9000), {}, r"of [\d,]+ parameters, this one has"),
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


def _wrong_on_one_rank() -> None:
    plan, is_wrong = planned(ranks=2), dist.get_rank() == 1
    wrong: list[tuple[Any, str]] = [
        (small_plan(layer=plan.inputs.layer), "has no chunks"),
        (planned(ranks=1), "shards over 1 rank"),
        ("missing.json", "missing.json cannot be read"),
    ]
    for other, words in wrong:
        with pytest.raises(moetune.RankMismatchError, match=words):
            shard(model_of(plan), plan=other if is_wrong else plan)
    with pytest.raises(moetune.RankMismatchError, match="chunk_bytes must be"):
        shard(model_of(plan), chunk_bytes=0 if is_wrong else 2**20)
    # Equal chunks of different plans: the ranks would run other steps than either says.
    inputs = replace(plan.inputs, profile="another")
    another = replace(plan, inputs=inputs, id=inputs.plan_id)
    with pytest.raises(moetune.RankMismatchError, match="rank 1: .*" + another.id):
        shard(model_of(plan), plan=another if is_wrong else plan)
    with pytest.raises(moetune.InputError, match="has no chunks"):
        shard(model_of(plan), plan=wrong[0][0])
    shard(model_of(plan), plan=plan)


@pytest.mark.dist
def test_no_rank_waits_for_one_that_has_another_plan() -> None:
    assert run_ranks(_wrong_on_one_rank, 2, timeout_seconds=60) == ["", ""]
