"""Predicted memory of steps against the allocator, and its steady state."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.mpipemoe.live import HostMemory, live_tensors
from benchmarks.mpipemoe.memory import measure_step
from moetune.comm.group import OneRank
from moetune.domain.constraints import STRATEGIES, Strategy
from moetune.domain.layer import Activation, LayerShape, Workload
from moetune.domain.optimizers import layer_optimizer
from moetune.runtime.moe.layer import ExpertLayer, MoELayer, TensorExpertLayer
from moetune.solve.layer.memory import layer_memory
from moetune.solve.layer.peak import peak_bytes
from tests.runtime.faults import Kind
from tests.runtime.gpu_runs import decision

GRADIENTS_ALONE = replace(layer_optimizer("float32"), moment_bytes=0)


class FirstOfTwo(OneRank):
    """The first of two ranks, whose sums lack the other's share: memory is the same."""

    members = (0, 1)

    def all_gather_values(self, values: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.stack((values, values))


def workload_of(
    tokens: int, num_ranks: int = 1, kind: Kind = "all_to_all", **shape: Any
) -> Workload:
    return Workload(
        layer=LayerShape(**shape), world_size=num_ranks, tokens_per_rank=tokens,
        expert_parallel="all_to_all" if kind == "all_to_all" else "tensor",
    )  # fmt: skip


def layer_of(
    workload: Workload, degree: int, strategy: Strategy = "none", *, bias: bool
) -> ExpertLayer:
    shape = workload.layer
    kind = MoELayer if workload.expert_parallel == "all_to_all" else TensorExpertLayer
    layer = kind(
        shape.d_model, shape.d_hidden, shape.num_experts, shape.top_k,
        activation=shape.activation, bias=bias, memory_reuse=strategy,
        communicator=FirstOfTwo() if workload.world_size > 1 else OneRank(),
    )  # fmt: skip
    layer.pin(decision(degree=degree))
    return layer


def train(layer: ExpertLayer, tokens: int) -> None:
    x = torch.randn(tokens, layer.shape.d_model, requires_grad=True)
    layer(x).backward(torch.randn(x.shape))
    layer.zero_grad()


@pytest.mark.parametrize(
    ("strategy", "activation", "num_experts", "top_k"),
    [
        ("none", "relu", 1, 1),
        ("none", "swiglu", 8, 2),
        ("S1", "gelu", 1, 1),
        ("S2", "relu", 16, 2),
        ("S3", "silu", 4, 1),
        ("S4", "relu", 1, 1),
        ("S4", "swiglu", 2, 2),
    ],
)
def test_a_prediction_is_the_peak_of_live_tensors(
    strategy: Strategy, activation: Activation, num_experts: int, top_k: int
) -> None:
    workload = workload_of(
        8192, d_model=128, d_hidden=384, num_experts=num_experts, top_k=top_k,
        activation=activation,
    )  # fmt: skip
    measured = measure_step(workload, 4, strategy)
    predicted = peak_bytes(
        workload=workload, degree=4, strategy=strategy, bias=False, is_grouped=False
    )
    assert predicted.device_bytes == pytest.approx(measured.live_bytes, rel=0.02)
    assert predicted.host_bytes == measured.host_bytes


@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("strategy", ["S1", "S2", "S3", "S4"])
def test_a_step_needs_a_chunk_of_hidden_values_more_than_the_papers_bound(
    strategy: Strategy, degree: int
) -> None:
    workload = workload_of(4096, d_model=192, d_hidden=768, num_experts=1, activation="relu")
    memory = layer_memory(workload=workload, degree=degree, strategy=strategy)
    hidden = 4096 // degree * 768 * 4  # which the combine weights multiply, apart from T_M
    live = measure_step(workload, degree, strategy).live_bytes
    assert live <= 1.02 * memory.formula_bytes + hidden


@settings(deadline=None, max_examples=30)
@given(
    kind=st.sampled_from(["all_to_all", "all_to_all", "all_to_all", "tensor"]),
    tokens=st.integers(4000, 9000),
    d_model=st.sampled_from([128, 192]),
    d_hidden=st.sampled_from([128, 384]),
    num_experts=st.integers(1, 4),
    top_k=st.integers(1, 2),
    is_alone=st.booleans(),
    activation=st.sampled_from(["relu", "gelu", "swiglu"]),
    bias=st.booleans(),
    degree=st.integers(1, 6),
    strategy=st.sampled_from(STRATEGIES),
)
def test_any_prediction_is_the_peak_of_a_step(
    *,
    kind: Kind,
    tokens: int,
    d_model: int,
    d_hidden: int,
    num_experts: int,
    top_k: int,
    is_alone: bool,
    activation: Activation,
    bias: bool,
    degree: int,
    strategy: Strategy,
) -> None:
    num_ranks, top_k = 1, min(top_k, num_experts)
    if kind != "all_to_all":  # every token goes to every expert, so that ranks have equal shares
        num_ranks, strategy = 1 if is_alone else 2, "none"
        num_experts = top_k = 2 * top_k
        tokens -= tokens % 2
    workload = workload_of(
        tokens, num_ranks, kind, d_model=d_model, d_hidden=d_hidden, num_experts=num_experts,
        top_k=top_k, activation=activation,
    )  # fmt: skip
    with HostMemory() as host, live_tensors() as live:
        layer = layer_of(workload, degree, strategy, bias=bias)
        x, grad = torch.randn(2, tokens, d_model)
        x.requires_grad_()
        for _ in range(2):
            layer.zero_grad()
            x.grad = None
            layer(x).backward(grad)
    peak = peak_bytes(
        workload=workload, degree=degree,
        strategy=strategy, bias=bias, optimizer=GRADIENTS_ALONE,
        is_grouped=False,
    )  # fmt: skip
    measured, predicted = live.peak_bytes - host.peak_bytes, peak.device_bytes
    assert abs(measured - predicted) <= max(peak.routing_bytes, 0.02 * predicted)
    assert host.peak_bytes == peak.host_bytes
    if kind != "all_to_all":
        memory = layer_memory(workload=workload, degree=degree)
        assert memory.activation_bytes == peak.activation_bytes
        assert memory.buffer_bytes == peak.buffer_bytes + peak.ring_bytes


@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_a_tensor_groups_prediction_is_the_peak_of_live_tensors(activation: Activation) -> None:
    workload = workload_of(
        8192, 2, "tensor", d_model=128, d_hidden=384, num_experts=2, top_k=2, activation=activation
    )
    with live_tensors() as live:
        layer = layer_of(workload, 4, bias=False)
        x = torch.randn(8192, 128, requires_grad=True)
        grad = torch.randn(x.shape)
        for _ in range(2):
            layer.zero_grad()
            x.grad = None
            layer(x).backward(grad)
    predicted = peak_bytes(
        workload=workload, degree=4, bias=False,
        optimizer=GRADIENTS_ALONE, is_grouped=False)  # fmt: skip
    assert predicted.device_bytes == pytest.approx(live.peak_bytes, rel=0.02)


def test_two_byte_activations_are_predicted_with_their_real_states() -> None:
    layer = LayerShape(d_model=256, d_hidden=512, num_experts=2, activation="relu")
    workload = Workload(layer=layer, world_size=1, tokens_per_rank=16384, dtype="bfloat16")
    measured = measure_step(workload, 4, "S4")
    predicted = peak_bytes(
        workload=workload, degree=4, strategy="S4", bias=False,
        optimizer=replace(layer_optimizer("bfloat16"), master_bytes=0, moment_bytes=4),
        is_grouped=False,
    )  # fmt: skip
    assert predicted.device_bytes == pytest.approx(measured.live_bytes, rel=0.02)


def test_memory_is_steady_when_batches_and_strategies_change() -> None:
    torch.manual_seed(0)
    layer = MoELayer(64, 256, 4, 2, memory_reuse=True)
    draw = random.Random(0)
    largest, num_warm = 512, 10

    def step(index: int) -> None:
        layer.pin(decision(STRATEGIES[index % len(STRATEGIES)], 4 if index % 2 else 2))
        train(layer, largest if index < num_warm else draw.randint(1, largest))

    with live_tensors() as warm:
        for index in range(num_warm):
            step(index)
    with HostMemory() as host, live_tensors() as live:
        for index in range(num_warm, 200):
            step(index)
    assert live.peak_bytes <= warm.peak_bytes
    assert live.left_bytes < largest * layer.shape.d_model * 4
    assert host.num_bytes == 0 < host.peak_bytes
