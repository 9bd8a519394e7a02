"""What ranks do in the tests of plan files that differ between them."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import moetune
from moetune.domain.document import canonical_json
from moetune.domain.errors import InputError, RankMismatchError
from moetune.domain.layer import LayerShape
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.moe.tensor_layer import TensorExpertLayer
from moetune.runtime.plans.book import PlanBook
from tests.runtime.plans import small_plan

SHAPE = LayerShape(d_model=8, d_hidden=16, num_experts=4, top_k=2)
PLAN = small_plan(layer=SHAPE)
SAME_QUESTION = small_plan(layer=SHAPE, degrees=(2, 1), ranges=())
OTHER_QUESTION = small_plan(layer=SHAPE, tokens=41)
SECOND = {
    "same question": canonical_json(SAME_QUESTION),
    "other question": canonical_json(OTHER_QUESTION),
    "cut short": canonical_json(PLAN)[:-200],
    "other layer": canonical_json(small_plan(layer=SHAPE, world_size=4)),
    "spaces": canonical_json(PLAN).replace(",", ", "),
}


def write(folder: Path, second: str) -> None:
    """Write the plan files of both ranks; an unknown name leaves the second one out."""
    (folder / "0").mkdir()
    (folder / "1").mkdir()
    (folder / "0" / "plan.json").write_text(canonical_json(PLAN))
    if second in SECOND:
        (folder / "1" / "plan.json").write_text(SECOND[second])


def same_text(error: Exception) -> str:
    """Return the error's text, which all ranks must have."""
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, str(error))
    assert len(set(texts)) == 1
    return texts[0]


def layers_differ(folder: Path, says: str) -> None:
    path = folder / str(dist.get_rank()) / "plan.json"
    with pytest.raises(RankMismatchError) as caught:
        MoELayer(8, 16, 4, 2, plan=path)
    text = same_text(caught.value)
    assert f"rank 0: plan {PLAN.id[:6]} with 4 and 3 chunks (digest " in text
    assert f"rank 1: {says}" in text


def plans_of_programs_differ() -> None:
    """Plans of one question differ, given as they are or in a book."""
    plans = [
        small_plan(layer=SHAPE, expert_parallel="tensor", degrees=degrees)
        for degrees in ((4, 3), (2, 1))
    ]
    with pytest.raises(RankMismatchError, match=r"rank 1: plan .* with 2 and 1 chunks"):
        TensorExpertLayer(8, 16, 4, 2, plan=plans[dist.get_rank()])
    plan = (PLAN, SAME_QUESTION)[dist.get_rank()]
    with pytest.raises(RankMismatchError, match=r"rank 1: plan .* with 2 and 1 chunks"):
        MoELayer(8, 16, 4, 2, planbook=PlanBook([plan]))


def layers_agree(folder: Path) -> None:
    layer = MoELayer(8, 16, 4, 2, plan=folder / str(dist.get_rank()) / "plan.json")
    layer(torch.randn(40, 8))
    assert layer.decision.forward_degree == 4


def layers_have_no_plan(folder: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.json cannot be read"):
        MoELayer(8, 16, 4, 2, plan=folder / "nowhere.json")
    dist.barrier()


def layers_made_later_differ(folder: Path) -> None:
    """Parameters on the meta device are drawn later, and the plans are compared then."""
    path = folder / str(dist.get_rank()) / "plan.json"
    layer = MoELayer(8, 16, 4, 2, plan=path, device="meta").to_empty(device="cpu")
    with pytest.raises(RankMismatchError, match="rank 1: plan"):
        layer.reset_parameters()


def shared_books_are_the_first_ranks(folder: Path) -> None:
    """Files of other ranks, of other plans or of none, are not read."""
    mine = folder / str(dist.get_rank())
    for source in (mine, str(mine / "plan.json"), [mine / "plan.json"]):
        assert moetune.open_planbook(source).plans == (PLAN,)
    if dist.get_rank() == 0:
        os.environ["MOETUNE_DISABLE"] = "1"
    assert moetune.open_planbook(mine).plans == ()
