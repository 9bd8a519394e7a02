"""Ranks with different plan files: the same error on all of them, and none waits."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import moetune
from moetune.domain.document import canonical_json
from moetune.domain.errors import InputError, RankMismatchError
from moetune.domain.kernels import KernelChoice
from moetune.domain.layer import LayerShape
from moetune.runtime.moe.layer import MoELayer, TensorExpertLayer
from moetune.runtime.plans.book import PlanBook, read_plans, share_plans
from tests.ranks import run_ranks
from tests.runtime.faults import same_text
from tests.runtime.plans import small_plan

SIZES = 8, 16, 4, 2
SHAPE = LayerShape(d_model=8, d_hidden=16, num_experts=4, top_k=2)
PLAN = small_plan(layer=SHAPE)
SAME_QUESTION = small_plan(layer=SHAPE, degrees=(2, 2), ranges=())
OTHER_QUESTION = small_plan(layer=SHAPE, tokens=41)
SECOND = {
    "same question": (
        canonical_json(SAME_QUESTION), f"plan {PLAN.id[:6]} with 2 chunks (digest "
    ),
    "other question": (
        canonical_json(OTHER_QUESTION), f"plan {OTHER_QUESTION.id[:6]} with 4 chunks (digest "
    ),
    "none": (None, "plan "),
    "cut short": (canonical_json(PLAN)[:-200], ""),
    "other layer": (canonical_json(small_plan(layer=SHAPE, world_size=4)), "plan "),
    "spaces": (canonical_json(PLAN).replace(",", ", "), None),
}  # fmt: skip
"""Plan file of the second rank, and what the error says of it; None without a file or an error."""


def _layers_compare_their_plans(folder: Path) -> None:
    for name, (_, says) in SECOND.items():
        path = folder / name / str(dist.get_rank()) / "plan.json"
        if says is None:
            layer = MoELayer(*SIZES, plan=path)
            layer(torch.randn(40, 8))
            assert layer.decision.forward_degree == 4
            continue
        with pytest.raises(RankMismatchError) as caught:
            MoELayer(*SIZES, plan=path)
        text = same_text(caught.value)
        has_plan = name not in {"none", "cut short", "other layer"}
        first = f"plan {PLAN.id[:6]} with 4 chunks (digest " if has_plan else "fine"
        assert f"rank 0: {first}" in text
        assert f"rank 1: {says}" in text
    with pytest.raises(InputError, match=r"nowhere\.json cannot be read"):
        MoELayer(*SIZES, plan=folder / "nowhere.json")  # which is each rank's own error
    # Parameters on the meta device are drawn later, and the plans are compared then.
    path = folder / "same question" / str(dist.get_rank()) / "plan.json"
    layer = MoELayer(*SIZES, plan=path, device="meta").to_empty(device="cpu")
    with pytest.raises(RankMismatchError, match="rank 1: plan"):
        layer.reset_parameters()


def _programs_compare_theirs(folder: Path) -> None:
    """Plans of one question differ, given as they are or in a book; shared ones are the first's."""
    rank = dist.get_rank()
    degrees = ((4, 4), (2, 2))[rank]
    plan = small_plan(layer=SHAPE, expert_parallel="tensor", degrees=degrees)
    with pytest.raises(RankMismatchError, match=r"rank 1: plan .* with 2 chunks"):
        TensorExpertLayer(*SIZES, plan=plan)
    book = PlanBook([(PLAN, SAME_QUESTION)[rank]])
    with pytest.raises(RankMismatchError, match=r"rank 1: plan .* with 2 chunks"):
        MoELayer(*SIZES, plan=book)
    with pytest.raises(InputError, match="not-there"):
        share_plans(lambda: PlanBook(read_plans([folder / "not-there.json"])))
    for name in ("other question", "none"):
        mine = folder / name / str(rank)
        for source in (mine, str(mine / "plan.json"), [mine / "plan.json"]):
            assert moetune.open_planbook(source).plans == (PLAN,)
    if rank == 0:
        os.environ["MOETUNE_DISABLE"] = "1"
    assert moetune.open_planbook(folder / "none" / str(rank)).plans == ()


def _a_kernel_that_a_rank_lacks_is_refused_on_all(_: Path) -> None:
    kernel = KernelChoice(name="grouped_mm", is_usual=False, why="", others=())
    layer = MoELayer(*SIZES, plan=replace(PLAN, kernel=kernel))
    layer(torch.randn(40, 8))
    assert layer.decision.kernel == "grouped_mm"
    layer = MoELayer(*SIZES, plan=replace(PLAN, kernel=kernel))
    if dist.get_rank() == 1:
        del torch._grouped_mm  # as an older torch
    with pytest.raises(RankMismatchError) as caught:
        layer(torch.randn(40, 8))
    assert "kernel 'grouped_mm' cannot run here: torch" in same_text(caught.value)


@pytest.mark.parametrize(
    "worker",
    [
        _layers_compare_their_plans, _programs_compare_theirs,
        _a_kernel_that_a_rank_lacks_is_refused_on_all,
    ],
)  # fmt: skip
def test_ranks_that_differ_raise_the_same_error(worker: object, tmp_path: Path) -> None:
    for name, (second, _) in SECOND.items():
        for rank, text in enumerate((canonical_json(PLAN), second)):
            (tmp_path / name / str(rank)).mkdir(parents=True)
            if text is not None:
                (tmp_path / name / str(rank) / "plan.json").write_text(text)
    assert run_ranks(worker, 2, tmp_path) == ["", ""]  # type: ignore[arg-type]  # both are workers


def test_of_many_plans_some_are_named_and_the_others_counted() -> None:
    words = PlanBook([PLAN] * 12).described
    assert words.count(f"plan {PLAN.id[:6]}") == 3
    assert " and 9 more (digest " in words
