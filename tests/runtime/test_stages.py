"""The language model in stages: its losses, and what its ranks do; random layouts train it.

B sequences, S tokens each.
"""

import datetime as dt
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from examples import train_lm
from examples.language_model import LanguageModel, next_token_loss, staged_language_model
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape
from moetune.domain.model import Transformer
from moetune.domain.training import FoldedLayout
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.parallel.groups import join
from moetune.runtime.parallel.stages import Stages
from tests.ranks import run_ranks

SEED, BATCH, LENGTH, BALANCE = 3, 8, 6, 0.5
VOCABULARY = 257
"""Divides by no number of ranks."""


def shape_of(num_blocks: int) -> Transformer:
    return Transformer(
        moe=LayerShape(d_model=8, d_hidden=16, num_experts=4, top_k=1), num_layers=num_blocks,
        num_heads=4, length=LENGTH, vocab_size=VOCABULARY, moe_every=1,
    )  # fmt: skip


def text() -> torch.Tensor:
    """Return the global batch (B, S + 1)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def whole_model(num_blocks: int) -> LanguageModel:
    layer = shape_of(num_blocks).moe

    def make_moe() -> MoELayer:
        sizes = layer.d_model, layer.d_hidden, layer.num_experts, layer.top_k
        return MoELayer(*sizes, pipeline=False)

    model = LanguageModel(shape_of(num_blocks), make_moe).double()
    model.reset_parameters(SEED)
    return model


def stages_of(num_micro_batches: int, balance: float = 0.0) -> Stages:
    """Return one stage of a block on each rank."""
    layout = FoldedLayout(pp=dist.get_world_size(), micro_batch=BATCH // num_micro_batches)
    return staged_language_model(
        shape_of(layout.pp), join(layout, timeout=dt.timedelta(seconds=30)), num_sequences=BATCH,
        seed=SEED, dtype=torch.float64, balance=balance, pipeline=False,
    )  # fmt: skip


def backward(stages: Stages) -> torch.Tensor:
    return stages.backward(text()[:, :-1], text()[:, 1:])


def gate_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: each.grad
        for name, each in model.named_parameters()
        if name.endswith("gate.weight") and each.grad is not None
    }


def _balance_reaches_every_stage(wanted: dict[str, torch.Tensor]) -> None:
    stages = stages_of(2, BALANCE)
    backward(stages)
    gradients = gate_gradients(stages.parts)
    assert gradients
    for name, grad in gradients.items():
        of_whole = wanted[name.split(".", 1)[1]]
        torch.testing.assert_close(grad, of_whole, rtol=1e-10, atol=1e-14)


@pytest.mark.dist
def test_the_balance_loss_of_every_stage_reaches_its_gates() -> None:
    model = whole_model(2)
    for text_BS in text().chunk(2):
        loss = next_token_loss(model(text_BS[:, :-1]), text_BS[:, 1:])
        layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        loss = loss + BALANCE * torch.stack([layer.aux_loss for layer in layers]).mean()
        (loss / 2).backward()
    assert run_ranks(_balance_reaches_every_stage, 2, gate_gradients(model)) == ["", ""]


def _a_rank_dies() -> None:
    stages = stages_of(2)
    stages.total_loss(backward(stages))
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(1)
    with pytest.raises(Exception, match=r"(?i)connection|closed|reset|timed out|failed"):
        stages.total_loss(backward(stages))


@pytest.mark.dist
def test_no_rank_waits_for_a_stage_that_died() -> None:
    survivor, dead = run_ranks(_a_rank_dies, 2)
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
    stages = stages_of(1)
    with pytest.raises(InputError, match=r"7 .*\b8\b"):
        stages.backward(text()[1:, :-1], text()[1:, 1:])
    for module in stages.parts.modules():
        if hasattr(module, "experts"):
            module.float()
    with pytest.raises(InputError, match=r"torch\.float32"):
        backward(stages)


@pytest.mark.usefixtures("group_of_one")
def test_the_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--steps 8 --batch 4 --context 16 --d-model 16 --d-hidden 32 --learning-rate 0.02"
    train_lm.train(train_lm.parse(words.split()), "cpu")
    losses = [float(line.split()[2]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.5


def test_drawn_weights_depend_on_seed_and_name_alone() -> None:
    first, second = whole_model(2), whole_model(2)
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
