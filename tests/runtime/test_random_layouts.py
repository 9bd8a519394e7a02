"""Layouts drawn from the planner's own space: each trains as one process does."""

import itertools
import pickle
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moetune.domain.errors import InputError
from moetune.domain.training import FoldedLayout
from moetune.runtime.parallel.groups import join
from moetune.runtime.parallel.optimizer import MasterOptimizer
from tests.ranks import run_ranks
from tests.runtime import layout_workers
from tests.runtime.random_layouts import World, draw_worlds, trained_worlds

SEED = 6
SAMPLE = {2: 100, 3: 40, 4: 48, 6: 12}
"""Worlds by their ranks. `python -m benchmarks.random_layouts` trains thousands."""


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", SAMPLE)
def test_a_layout_of_the_planner_trains_to_the_losses_and_weights_of_one_process(
    num_ranks: int, tmp_path: Path
) -> None:
    pairs = trained_worlds(num_ranks, SAMPLE[num_ranks], SEED)
    file = tmp_path / "differences"
    worker = layout_workers.layouts_train_equally
    assert run_ranks(worker, num_ranks, pickle.dumps(pairs), str(file)) == [""] * num_ranks
    assert len(file.read_text().splitlines()) == SAMPLE[num_ranks]


def test_the_sample_has_all_that_the_planner_offers() -> None:
    worlds = [world for ranks, count in SAMPLE.items() for world in _first(ranks, count)]
    layouts = [world.layout for world in worlds]
    batches = [world.global_batch for world in worlds]
    tensor = [row for row in layouts if row.dispatcher == "all_gather"]
    for what, chosen in {
        "experts in a tensor-parallel group": [row for row in tensor if row.tp > 1],
        "tensor-parallel stages": [row for row in tensor if row.tp > 1 and row.pp > 1],
        "replicas of tensor-parallel parts": [row for row in tensor if row.tp > 1 and row.dp > 1],
        "interleaved stages": [row for row in layouts if row.order == "interleaved"],
        "fewer micro-batches than stages": [
            row for batch, row in zip(batches, layouts, strict=True)
            if batch < row.micro_batch * row.dp * row.pp
        ],
        "uneven stages": [row for row in layouts if row.stages],
        "chunks in stages": [row for row in layouts if row.overlap == "chunks" and row.pp > 1],
        "ZeRO-1 of many stages a rank": [row for row in layouts if row.zero == 1 and row.vpp > 1],
        "ZeRO-3": [row for row in layouts if row.zero == 3 and row.stage_ranks > 1],
        "ZeRO-3 in stages": [
            row for row in layouts if row.zero == 3 and row.pp > 1 and row.stage_ranks > 1
        ],
        "ZeRO-3 of experts' replicas": [
            row for row in layouts if row.zero == 3 and row.ep > 1 and row.edp > 1
        ],
        "ZeRO-1 in stages": [
            row for row in layouts if row.zero == 1 and row.pp > 1 and row.stage_ranks > 1
        ],
        "recomputation in stages": [row for row in layouts if row.recompute and row.pp > 1],
    }.items():  # fmt: skip
        assert chosen, what


def _first(num_ranks: int, count: int) -> Iterator[World]:
    return itertools.islice(draw_worlds(num_ranks, random.Random(SEED)), count)


@pytest.mark.usefixtures("single_rank_group")
@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (FoldedLayout(zero=2), "ZeRO stage 2"),
        (FoldedLayout(recompute=("moe",)), "recomputation of moe"),
        (FoldedLayout(dispatcher="deepep"), "dispatcher deepep"),
        (FoldedLayout(schedule="zero_bubble"), "schedule zero_bubble"),
        (FoldedLayout(offload_optimizer=0.5), "states in host memory"),
        (FoldedLayout(ep=2), "ep .2. does not divide"),
        (FoldedLayout(etp=2), "etp 2"),
        (FoldedLayout(dp=2), "2 ranks"),
    ],
)
def test_what_the_planner_does_not_offer_is_refused_by_name(
    layout: FoldedLayout, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        join(layout)


def test_two_byte_parameters_are_updated_in_float32() -> None:
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = MasterOptimizer([weight], lambda parts: torch.optim.SGD(parts, lr=1.0))
    for _ in range(4):
        weight.grad = torch.full_like(weight, 2**-9)
        optimizer.step()
    assert weight.tolist() == [1 - 2**-7] * 3  # each step alone is lost in bfloat16
