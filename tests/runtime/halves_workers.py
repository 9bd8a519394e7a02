"""What ranks do in the tests of batches in halves: `moetune.BatchOverlap(split=…)`."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moetune
from moetune.comm.group import Communicator, OneRank
from moetune.domain.errors import InputError
from moetune.domain.training import BATCH_SPLITS, BatchSplit, Recompute
from moetune.runtime.moe.layer import MoELayer
from moetune.runtime.parallel.block import Attention, TransformerBlock
from tests.runtime.companion_nets import check_equal
from tests.runtime.overlap_workers import check_gradients, grads_of

SEQUENCES, LENGTH, WIDTH = 4, 6, 8
BALANCE = 0.3


class Model(nn.Module):
    """Two blocks of attention and experts, whose balance losses are added to the gradients."""

    def __init__(
        self,
        *,
        communicator: Communicator | None = None,
        recompute: frozenset[Recompute] = frozenset(),
        balance: float = BALANCE,
        **options: Any,
    ) -> None:
        super().__init__()
        torch.manual_seed(5)
        own: dict[str, Any] = {} if communicator is None else {"communicator": communicator}
        self.blocks = nn.Sequential(*(
            TransformerBlock(
                Attention(WIDTH, 2, OneRank(), recompute=recompute),
                MoELayer(WIDTH, 16, 6, 2, **own, **options), WIDTH, balance, recompute,
            )
            for _ in range(2)
        ))  # fmt: skip
        self.double()

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.blocks(x_BSD)
        return y


def layers_of(model: nn.Module) -> list[MoELayer]:
    return [each for each in model.modules() if isinstance(each, MoELayer)]


def tokens(rank: int, sequences: int = SEQUENCES) -> torch.Tensor:
    generator = torch.Generator().manual_seed(70 + rank)
    return torch.randn(sequences, LENGTH, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, count: int, x_BSD: torch.Tensor) -> torch.Tensor:
    """The tokens' part of a loss of `count` numbers, and the layers' own."""
    y_BSD: torch.Tensor = model(x_BSD)
    balance = torch.stack([each.aux_loss for each in layers_of(model)])
    return y_BSD.square().sum() / count + 0.1 * balance.sum()


def wanted(batches: list[torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Return the gradients of one process that has every rank's whole batch, and the losses."""
    model = Model(communicator=OneRank(), balance=BALANCE / len(batches), pipeline=1)
    losses = []
    for x in batches:
        losses.append(loss_of(model, x.numel(), x))
        (losses[-1] / len(batches)).backward()
    return grads_of(model), [each.detach() for each in losses]


def halved(x_BSD: torch.Tensor, split: BatchSplit, cut: int) -> list[torch.Tensor]:
    return list(x_BSD.tensor_split((cut,), dim=0 if split == "sequences" else 1))


def ways() -> Iterator[tuple[dict[str, Any], frozenset[Recompute]]]:
    degrees = [({"pipeline": one, "memory_reuse": reuse}) for one, reuse in (
        (1, False), (3, False), (2, "S1"), (3, "S4")
    )]  # fmt: skip
    again: list[tuple[Recompute, ...]] = [
        (), ("full",), ("core_attn",), ("core_attn", "moe", "norm")
    ]  # fmt: skip
    for options, recompute in itertools.product(degrees, again):
        yield options, frozenset(recompute)


def equal_gradients() -> None:
    """Both splits, in even and uneven halves, in every way of running a layer, for two steps."""
    world, rank = dist.get_world_size(), dist.get_rank()
    expected, losses = wanted([tokens(one) for one in range(world)])
    for split, (options, recompute) in itertools.product(BATCH_SPLITS, ways()):
        model = moetune.replicate(Model(recompute=recompute, **options))
        x_BSD = tokens(rank)
        overlap = moetune.BatchOverlap[torch.Tensor](
            model, partial(loss_of, model, x_BSD.numel()), split=split
        )
        for cut in (2, 1):
            model.zero_grad()
            parts = overlap(halved(x_BSD, split, cut))
            check_gradients(model, expected)
            assert torch.allclose(torch.stack(parts).sum(), losses[rank], rtol=1e-11)
        check_balance(model, x_BSD)


def check_balance(model: nn.Module, x_BSD: torch.Tensor) -> None:
    """Behind a step a layer has the balance loss of the whole batch."""
    alone = Model(communicator=OneRank(), pipeline=1)
    alone(x_BSD)
    for found, whole in zip(layers_of(model), layers_of(alone), strict=True):
        assert torch.allclose(found.aux_loss, whole.aux_loss.detach(), rtol=1e-11)


def one_sequence() -> None:
    """A sequence that cannot be halved has positions that can."""
    world, rank = dist.get_world_size(), dist.get_rank()
    batches = [tokens(one, sequences=1) for one in range(world)]
    expected, _ = wanted(batches)
    model = moetune.replicate(Model())
    loss = partial(loss_of, model, batches[rank].numel())
    moetune.BatchOverlap(model, loss, split="positions")(halved(batches[rank], "positions", 3))
    check_gradients(model, expected)


def no_sum_of_two_batches() -> None:
    """As two batches the same halves have other balance losses: the test above can fail."""
    world, rank = dist.get_world_size(), dist.get_rank()
    expected, _ = wanted([tokens(one) for one in range(world)])
    model = moetune.replicate(Model())
    loss = partial(loss_of, model, tokens(rank).numel())
    moetune.BatchOverlap(model, loss)(halved(tokens(rank), "sequences", 2))
    with pytest.raises(AssertionError):
        check_gradients(model, expected)


def without_gradients_of_keys() -> None:
    """A loss of the first positions alone leaves their keys without gradients of the last ones."""
    rank = dist.get_rank()
    x_BSD = tokens(rank)

    def loss_of_first(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y_BSD: torch.Tensor = model(x)
        return y_BSD[:, :3].square().sum()

    whole = moetune.replicate(Model(balance=0.0))
    loss_of_first(whole, x_BSD).backward()
    model = moetune.replicate(Model(balance=0.0))

    def loss(half: torch.Tensor) -> torch.Tensor:
        y_BSD: torch.Tensor = model(half)
        is_first = bool(torch.equal(half, x_BSD[:, :3]))
        return y_BSD.square().sum() if is_first else 0 * next(model.parameters()).sum()

    moetune.BatchOverlap(model, loss, split="positions")(halved(x_BSD, "positions", 3))
    check_equal(grads_of(model), grads_of(whole))


def refusals() -> None:
    """What would change numbers is refused by name, on all ranks, and nothing hangs."""
    rank = dist.get_rank()
    x_BSD = tokens(rank)

    def failing(model: nn.Module, loss: Callable[[torch.Tensor], torch.Tensor], split: Any) -> str:
        with pytest.raises(InputError) as raised:
            moetune.BatchOverlap(model, loss, split=split)(halved(x_BSD, "sequences", 2))
        return str(raised.value)

    def plain(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        return partial(loss_of, model, x_BSD.numel())

    model = moetune.replicate(Model())
    assert "split must be one of sequences, positions" in failing(model, plain(model), "tokens")
    dropping = moetune.replicate(Model(capacity_factor=1.0))
    assert "drops the lightest" in failing(dropping, plain(dropping), "sequences")
    normed = moetune.replicate(nn.Sequential(Model(), nn.BatchNorm1d(LENGTH).double()))
    assert "normalizes by all tokens" in failing(normed, plain(normed), "sequences")
    blind = moetune.replicate(layers_of(Model())[0])
    assert "no attention" in failing(blind, plain(blind), "positions")

    def twice(half: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(model(half)).sum()
        return y

    assert "twice" in failing(model, twice, "sequences")

    calls = itertools.count()

    def one_alone(half: torch.Tensor) -> torch.Tensor:
        first, second = model.blocks
        block = first if next(calls) == 0 else second
        y: torch.Tensor = block(half).sum()
        return y

    message = failing(model, one_alone, "sequences")
    assert "wait for each other" in message or "did not pass" in message
    model.zero_grad()
    expected, _ = wanted([tokens(one) for one in range(dist.get_world_size())])
    moetune.BatchOverlap(model, plain(model), split="sequences")(halved(x_BSD, "sequences", 2))
    check_gradients(model, expected)


def several_ranks() -> None:
    """All of the above in one start of the ranks."""
    equal_gradients()
    one_sequence()
    no_sum_of_two_batches()
    without_gradients_of_keys()
    refusals()
