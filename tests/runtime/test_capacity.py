"""A capacity whose rows are always as many: dense numbers, no stop of the host, equal sizes."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.mpipemoe.memory import measure_step
from moetune.domain.constraints import Strategy
from moetune.domain.errors import InputError
from moetune.domain.layer import LayerShape, Workload
from moetune.runtime.moe.layer import MoELayer
from moetune.solve.layer.peak import peak_bytes
from moetune.solve.runtime import StateBytes
from tests.cuda_kit import FakeCuda, MirrorWorld
from tests.ranks import run_ranks
from tests.runtime import capacity_workers
from tests.runtime.gpu_runs import GPU, decision
from tests.runtime.plans import small_plan

STRATEGIES: tuple[Strategy, ...] = ("none", "S1", "S4")


def test_one_rank_equals_dense() -> None:
    capacity_workers.dense_matrix()


def test_one_rank_with_grouped_kernels_equals_dense() -> None:
    capacity_workers.grouped_matrix()


def test_two_ranks_equal_dense() -> None:
    assert run_ranks(capacity_workers.on_ranks, 2) == [""] * 2


class Sizes(TorchDispatchMode):
    """The operations of a step in their order, with the sizes of what they make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.made: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [one for one in pytree.tree_leaves(result) if isinstance(one, torch.Tensor)]
        self.made.append((str(func), [tuple(one.shape) for one in tensors]))
        return result


def gpu_layer(**options: Any) -> MoELayer:
    return MoELayer(
        8, 16, 4, 2, capacity_factor=1.25, pad_to_capacity=True, device=GPU, dtype=torch.bfloat16,
        **options,
    )  # fmt: skip


def tokens_for(layer: MoELayer, *, skewed: bool) -> torch.Tensor:
    """Return tokens that want different experts, or all the same two."""
    x = torch.randn(24, 8)
    if skewed:
        x += 100 * layer.gate.weight.detach().to("cpu").float()[:2].sum(0)
    return x.bfloat16().to(GPU).requires_grad_()


@pytest.mark.parametrize("degrees", [(1, 1), (4, 4), (4, 3)])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_host_never_waits_and_no_size_depends_on_the_routing(
    strategy: Strategy, degrees: tuple[int, int], num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    found, dropped = [], []
    with FakeCuda() as cuda, MirrorWorld(cuda, rank=num_ranks - 1, num_ranks=num_ranks):
        layer = gpu_layer()
        layer.pin(decision(strategy, degrees))
        both = [tokens_for(layer, skewed=skewed) for skewed in (False, True)]
        begin = len(cuda.syncs)
        layer(both[0])
        # Ranks compare their tokens in the first call, one rank has nobody to ask.
        assert cuda.syncs[begin:] == ["tolist"] * (num_ranks - 1)
        for x in both:
            layer.zero_grad()
            begin = len(cuda.syncs)
            with monkeypatch.context() as patch, Sizes() as sizes:
                patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
                layer(x).sum().backward()
            assert cuda.syncs[begin:] == []
            found.append(sizes.made)
            dropped.append(layer.num_dropped)
    assert found[0] == found[1]
    assert dropped[0] < dropped[1] == 2 * (24 - 15)


def test_the_first_call_of_several_ranks_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeCuda() as cuda, MirrorWorld(cuda, rank=1):
        layer = gpu_layer()
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(InputError, match="outside of the capture"):
            layer(tokens_for(layer, skewed=False))


def test_padding_needs_a_capacity() -> None:
    with pytest.raises(InputError, match="capacity_factor"):
        MoELayer(8, 16, 4, pad_to_capacity=True)


def test_plans_are_looked_up_by_the_rows_that_are_computed() -> None:
    shape = LayerShape(d_model=8, d_hidden=16, num_experts=4, top_k=2, activation="gelu")
    layer = MoELayer(
        8, 16, 4, 2, capacity_factor=1.25, pad_to_capacity=True,
        plan=small_plan(layer=shape, world_size=1),
    )  # fmt: skip
    found = []
    for num_tokens in (8, 9):  # as many rows as 10 and 12 tokens without padding
        layer(torch.randn(num_tokens, 8))
        found.append((layer.decision.forward_degree, layer.decision.backward_degree))
    assert found == [(2, 2), (4, 3)]


@pytest.mark.parametrize(("degree", "strategy"), [(1, "none"), (4, "none"), (4, "S4")])
@pytest.mark.parametrize("capacity_factor", [0.75, 1.5])
def test_the_predicted_peak_has_the_padded_rows(
    degree: int, strategy: Strategy, capacity_factor: float
) -> None:
    shape = LayerShape(d_model=128, d_hidden=384, num_experts=4, top_k=2, activation="gelu")
    workload = Workload(layer=shape, world_size=1, tokens_per_rank=4096)
    found = measure_step(
        workload, degree, strategy, capacity_factor=capacity_factor, pad_to_capacity=True
    )
    predicted = peak_bytes(
        workload=workload, forward_degree=degree, backward_degree=degree, strategy=strategy,
        bias=False, states=StateBytes.adam("float32"), capacity_factor=capacity_factor,
        pad_to_capacity=True,
    )  # fmt: skip
    # Without the temporaries of single operations, as of steps without padding.
    assert 0.99 <= predicted.device_bytes / found.account_bytes <= 1.01


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_nan_reaches_no_expert_but_the_tokens_own(strategy: Strategy) -> None:
    torch.manual_seed(0)
    layer = MoELayer(
        8, 16, 8, 2, capacity_factor=3.0, pad_to_capacity=True, pipeline=3, memory_reuse=strategy
    )
    x = torch.randn(64, 8)
    chosen = set(layer.gate(x).experts_TK.unique().tolist())
    assert chosen == set(range(8))
    x[0] = torch.nan
    own = set(layer.gate(x).experts_TK[0].tolist())
    y = layer(x)
    assert y[1:].isfinite().all()
    y.sum().backward()
    for parameter in layer.experts.parameters():
        assert parameter.grad is not None
        flat = parameter.grad.flatten(1).isfinite().all(1).tolist()
        assert {expert for expert, is_finite in enumerate(flat) if not is_finite} <= own
