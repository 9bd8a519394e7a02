"""An expert without rows: its gradients are zero, whatever is in memory or in others' rows."""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from moetune.comm.group import OneRank
from moetune.domain.constraints import Strategy
from moetune.runtime.moe.layer import MoELayer
from tests.runtime.gpu_runs import STRATEGIES, decision
from tests.runtime.grouped_workers import grouped

IDLE = 1


@contextlib.contextmanager
def _filled() -> Iterator[None]:
    """Let torch fill memory that it allocates with NaN."""
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)


def _gradients(
    strategy: Strategy, activation: str, *, spoiled: bool, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the experts' gradients of two chunks, where one row of dy may be NaN."""
    layer = MoELayer(8, 16, 4, 2, activation=activation, communicator=OneRank())  # type: ignore[arg-type] # the grid holds plain strings
    layer.to(dtype).pin(decision(strategy, 3))
    with torch.no_grad():
        layer.gate.weight[IDLE] = -100.0  # of positive tokens: never chosen
    x = torch.rand(12, 8, dtype=dtype, requires_grad=True)
    dy = torch.ones(12, 8, dtype=dtype)
    if spoiled:
        dy[5] = float("nan")
    layer(x).backward(dy)
    return {
        name: leaf.grad for name, leaf in layer.experts.named_parameters() if leaf.grad is not None
    }


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_an_idle_expert_are_zero(strategy: Strategy, *, is_grouped: bool) -> None:
    kernels = grouped() if is_grouped else contextlib.nullcontext()
    with kernels, _filled():
        for activation, dtype in (
            ("gelu", torch.float32),
            ("gelu", torch.bfloat16),
            ("swiglu", torch.float32),
        ):
            for spoiled in (False, True):
                grads = _gradients(strategy, activation, spoiled=spoiled, dtype=dtype)
                assert len(grads) == (3 if activation == "swiglu" else 4)
                for name, grad in grads.items():
                    assert not grad[IDLE].any(), name
                    busy = torch.cat((grad[:IDLE], grad[IDLE + 1 :]))
                    assert busy.isfinite().all() != spoiled, name
