"""Selective checkpointing around a layer: gradients are those without it, kept steps run once."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from moetune import MoELayer
from moetune.domain.constraints import Strategy
from moetune.runtime.moe.function import StartedStep
from tests.ranks import run_ranks

Policy = Callable[..., CheckpointPolicy]


def keeps_all(*_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


def keeps_products(_: object, op: object, *__: object, **___: object) -> CheckpointPolicy:
    is_kept = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def keeps_steps(_: object, op: object, *__: object, **___: object) -> CheckpointPolicy:
    is_kept = op is torch.ops.moetune.routed_experts.default
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def gradients_are_those_without(strategy: Strategy, *, is_compiled: bool = False) -> None:
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    layer = MoELayer(
        d_model=8, d_hidden=12, num_experts=4, top_k=2, pipeline=2, memory_reuse=strategy
    )
    block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), layer)
    x, start, steps = torch.randn(32, 8), layer.start_step, list[object]()

    def counted(*values: Any) -> StartedStep:
        steps.append(values)
        return start(*values)

    layer.start_step = counted  # type: ignore[method-assign,assignment]

    def gradients(run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        given = x.clone().requires_grad_()
        y = run(given)
        grads = torch.autograd.grad(y.square().sum(), [given, *block.parameters()])
        return [*grads, y.detach()]

    expected = gradients(block)
    for policy in (keeps_all, keeps_products, keeps_steps):
        steps.clear()
        contexts = partial(create_selective_checkpoint_contexts, policy)
        run: Any = partial(checkpoint, block, use_reentrant=False, context_fn=contexts)
        if is_compiled:
            torch._dynamo.reset()
            run = torch.compile(run, fullgraph=True, backend="aot_eager")
        for grad, wanted in zip(gradients(run), expected, strict=True):
            torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-6)
        assert len(steps) == (2 if policy is keeps_products else 1)  # with their exchanges


@pytest.mark.parametrize("strategy", ["none", "S4"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradients_are_those_without_checkpoints(num_ranks: int, strategy: Strategy) -> None:
    if num_ranks == 1:
        gradients_are_those_without(strategy)
    else:
        assert run_ranks(gradients_are_those_without, num_ranks, strategy) == [""] * num_ranks


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler reads it
def test_a_compiled_block_keeps_its_steps_too(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    monkeypatch.setattr(torch._dynamo.config, name, True)
    gradients_are_those_without("S4", is_compiled=True)
