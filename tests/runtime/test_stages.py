"""The language model in stages: one process's losses under every layout."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from examples import train_lm
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.domain.model import Transformer
from moetune.runtime.moe.layer import MoELayer
from tests.ranks import run_ranks
from tests.runtime import stage_workers
from tests.runtime.stage_workers import Case, layout_of, losses_of_one_process, shape_of

NUM_STEPS = 3


@pytest.mark.dist
def test_dense_blocks_uneven_and_interleaved_stages_and_replicas_train_alike() -> None:
    every_second = shape_of(num_blocks=5, moe_every=2, top_k=2)
    four = shape_of(num_blocks=4, moe_every=2, top_k=2)
    losses = losses_of_one_process(every_second, NUM_STEPS)
    even = losses_of_one_process(four, NUM_STEPS)
    cases = [
        Case(layout=layout_of("tensor", pp=2, tp=2), shape=every_second, losses=losses,
             num_micro_batches=4),
        Case(layout=layout_of("all_to_all", pp=4), shape=every_second, losses=losses,
             num_micro_batches=8),
        Case(layout=layout_of("all_to_all", pp=2, dp=2, ep=2), shape=every_second, losses=losses,
             num_micro_batches=4, stages_per_rank=2),
        Case(layout=layout_of("all_to_all", dp=4, ep=2), shape=four, losses=even,
             num_micro_batches=2),
        Case(layout=layout_of("tensor", dp=2, tp=2), shape=four, losses=even),
        Case(layout=layout_of("tensor", pp=2, tp=2), shape=four, losses=even,
             num_micro_batches=4, stages_per_rank=2),
    ]  # fmt: skip
    assert run_ranks(stage_workers.layouts_train_alike, 4, cases) == [""] * 4


@pytest.mark.dist
def test_the_balance_loss_of_every_stage_reaches_its_gates() -> None:
    shape = shape_of(num_blocks=2, moe_every=1)
    wanted = stage_workers.gate_gradients_with_balance(shape, 0.5, num_micro_batches=2)
    case = Case(layout=layout_of("tensor", pp=2), shape=shape, losses=(), num_micro_batches=2)
    reports = run_ranks(stage_workers.balance_reaches_every_stage, 2, case, 0.5, wanted)
    assert reports == ["", ""]


@pytest.mark.dist
def test_both_directions_of_a_link_are_used_at_once() -> None:
    shape = shape_of(num_blocks=3, moe_every=1)
    case = Case(layout=layout_of("tensor", pp=3), shape=shape, losses=(), num_micro_batches=4)
    assert run_ranks(stage_workers.batches_receive_first, 3, case) == [""] * 3


@pytest.mark.dist
def test_no_rank_waits_for_a_stage_that_died() -> None:
    case = Case(
        layout=layout_of("tensor", pp=2), shape=shape_of(num_blocks=2, moe_every=1), losses=(),
        num_micro_batches=2,
    )  # fmt: skip
    survivor, dead = run_ranks(stage_workers.a_rank_dies, 2, case)
    assert survivor == ""
    assert dead != ""


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    store = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_errors_of_layers_and_of_the_batch_reach_the_caller() -> None:
    shape = shape_of(num_blocks=1, moe_every=1)
    stages = stage_workers.stages_of(Case(layout=layout_of("all_to_all"), shape=shape, losses=()))
    text_BS = stage_workers.text_of(0)
    with pytest.raises(InputError, match=r"7 .*\b8\b"):
        stages.backward(text_BS[1:, :-1], text_BS[1:, 1:])
    for module in stages.parts.modules():
        if isinstance(module, MoELayer):
            module.float()
    with pytest.raises(InputError, match=r"torch\.float32"):
        stage_workers.backward(stages, 0)


@pytest.mark.usefixtures("group_of_one")
def test_the_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--steps 8 --batch 4 --context 16 --d-model 16 --d-hidden 32 --learning-rate 0.02"
    train_lm.train(train_lm.parse(words.split()), "cpu")
    losses = [float(line.split()[2]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.5


def test_drawn_weights_depend_on_seed_and_name_alone() -> None:
    shape = shape_of(num_blocks=2, moe_every=1)
    first, second = stage_workers.whole_model(shape), stage_workers.whole_model(shape)
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other), name
    weights = first.state_dict()
    name = "blocks.{}.attention.qkv.weight"
    assert not torch.equal(weights[name.format(0)], weights[name.format(1)])


def test_a_model_whose_sizes_cannot_be_is_refused() -> None:
    layer = LayerShape(d_model=6, d_hidden=8, num_experts=2)
    with pytest.raises(InputError, match=r"\b3 .*\b6\b"):
        Transformer(moe=layer, num_layers=1, num_heads=4, length=4, vocab_size=8, moe_every=1)
    with pytest.raises(InputError, match=r"moe_every .*0"):
        Transformer(moe=layer, num_layers=1, num_heads=2, length=4, vocab_size=8, moe_every=-1)
