"""Selective checkpointing around a layer: gradients are those without it, whatever is kept."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

from moetune import MoELayer
from moetune.domain.constraints import Strategy
from tests.ranks import run_ranks

Policy = Callable[..., CheckpointPolicy]
_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.mm.out, torch.ops.aten.addmm.default}


def keeps_all(*_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def keeps_products(_: object, op: object, *__: object, **___: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


class KeepsEveryOtherProduct:
    """As torchtitan's default has it."""

    def __init__(self) -> None:
        self.seen: Counter[bool] = Counter()

    def __call__(self, context: Any, op: object, *_: object, **__: object) -> CheckpointPolicy:
        if op not in _PRODUCTS:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.seen[context.is_recompute] += 1
        is_kept = self.seen[context.is_recompute] % 2
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


MAKERS: tuple[Callable[[], Policy], ...] = (
    lambda: keeps_all, lambda: keeps_products, KeepsEveryOtherProduct
)  # fmt: skip


def gradients_are_those_without(strategy: Strategy) -> None:
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    layer = MoELayer(
        d_model=8, d_hidden=12, num_experts=4, top_k=2, pipeline=2, memory_reuse=strategy
    )
    dense = torch.nn.Linear(8, 8)
    x = torch.randn(32, 8)

    def gradients(make: Callable[[], Policy] | None) -> list[torch.Tensor]:
        given = x.clone().requires_grad_()
        block = torch.nn.Sequential(dense, torch.nn.ReLU(), layer)
        if make is None:
            y = block(given)
        else:
            y = checkpoint(
                block, given, use_reentrant=False,
                context_fn=partial(create_selective_checkpoint_contexts, make()),
            )  # fmt: skip
        found = torch.autograd.grad(y.square().sum(), [given, *block.parameters()])
        return [*found, y.detach()]

    expected = gradients(None)
    for make in MAKERS:
        for found, wanted in zip(gradients(make), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["none", "S4"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradients_are_those_without_checkpoints(num_ranks: int, strategy: Strategy) -> None:
    if num_ranks == 1:
        gradients_are_those_without(strategy)
    else:
        assert run_ranks(gradients_are_those_without, num_ranks, strategy) == [""] * num_ranks


def test_other_modes_still_see_the_layer() -> None:
    layer = MoELayer(d_model=8, d_hidden=12, num_experts=4, top_k=2)
    with FlopCounterMode(display=False) as counted:
        layer(torch.randn(32, 8))
    alone = counted.get_total_flops()
    with FlopCounterMode(display=False) as counted:
        checkpoint(
            layer, torch.randn(32, 8, requires_grad=True), use_reentrant=False,
            context_fn=partial(create_selective_checkpoint_contexts, keeps_products),
        )  # fmt: skip
    assert counted.get_total_flops() == alone > 0
