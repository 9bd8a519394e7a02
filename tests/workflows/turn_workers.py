"""What the ranks of the tests run; importable, because they are spawned."""

from dataclasses import replace
from unittest import TestCase

import torch

from moetune.comm.gloo import communicator_of
from moetune.domain.layer import LayerShape
from moetune.domain.model import Transformer
from moetune.domain.samples import TurnsPoint
from moetune.runtime.moe.layer import MoELayer
from moetune.workflows.turn_steps import BlocksInTurns

POINT = TurnsPoint(
    model=Transformer(
        moe=LayerShape(d_model=64, d_hidden=32, num_experts=4, top_k=2), num_layers=3, num_heads=2,
        length=64, vocab_size=1, moe_every=1,
    ), world_size=2, sequences=4, dtype="float64", degree=3,
)  # fmt: skip


HALVES = replace(POINT, split="positions")


def halves_take_turns() -> None:
    """Run both halves of the positions, and compare with whole sequences in the same weights."""
    made = BlocksInTurns(HALVES, device=torch.device("cpu"), communicator=communicator_of(None))
    assert [one[0].shape[1] for one in made.batches] == [POINT.model.length // 2] * 2
    made.once()
    found = _gradients(made)
    made.blocks.zero_grad()
    (first, first_grad), (last, last_grad) = made.batches
    for one in (first, last):
        one.grad = None
    y_BSD = made.blocks(torch.cat((first, last), dim=1))
    (y_BSD * torch.cat((first_grad, last_grad), dim=1)).sum().backward()
    for name, wanted in _gradients(made).items():
        assert wanted.abs().sum() > 0, name
        torch.testing.assert_close(found[name], wanted, rtol=1e-9, atol=1e-9)


def take_turns() -> None:
    """Run blocks in turns, and compare with one batch after the other in the same weights."""
    with TestCase().assertNoLogs():  # that no plan is there, say: they have their chunks
        made = BlocksInTurns(POINT, device=torch.device("cpu"), communicator=communicator_of(None))
        made.once()
    made.once()  # begins without the gradients of the last
    found = _gradients(made)
    made.blocks.zero_grad()
    for batch in made.batches:
        batch[0].grad = None
        made.loss_of(batch).backward()
    for name, wanted in _gradients(made).items():
        assert wanted.abs().sum() > 0, name
        torch.testing.assert_close(found[name], wanted, rtol=1e-9, atol=1e-9)


def balance() -> None:
    """Count the rows of all experts over both batches and ranks."""
    made = BlocksInTurns(POINT, device=torch.device("cpu"), communicator=communicator_of(None))
    layers = [one for one in made.blocks.modules() if isinstance(one, MoELayer)]
    counts = {layer: torch.zeros(4) for layer in layers}
    for layer, rows_E in counts.items():
        layer.register_forward_pre_hook(
            lambda layer, inputs, rows_E=rows_E: _count(layer, inputs[0], rows_E)
        )
    made.once()
    for rows_E in counts.values():
        torch.distributed.all_reduce(rows_E)
        assert rows_E.sum() == 2 * 2 * 4 * 64 * 2
        assert rows_E.max() < 1.15 * rows_E.mean()


def _count(layer: MoELayer, x_BSD: torch.Tensor, rows_E: torch.Tensor) -> None:
    with torch.no_grad():
        chosen = layer.gate(x_BSD.detach().flatten(0, -2)).experts_TK
    rows_E += torch.bincount(chosen.flatten(), minlength=4)


def _gradients(made: BlocksInTurns) -> dict[str, torch.Tensor]:
    found = {name: each.grad for name, each in made.blocks.named_parameters()}
    found |= {f"batch {number}": one[0].grad for number, one in enumerate(made.batches)}
    return {name: each.clone() for name, each in found.items() if each is not None}
