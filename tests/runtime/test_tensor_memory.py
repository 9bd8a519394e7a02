"""What the tensor-parallel layer holds, against the solver's formulas and the allocator."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.mpipemoe.live import live_tensors
from moetune.comm.group import OneRank
from moetune.domain.layer import Activation, LayerShape, Workload
from moetune.domain.plan import Decision
from moetune.runtime.moe.tensor_layer import TensorExpertLayer
from moetune.solve.layer.memory import layer_memory
from moetune.solve.layer.peak import StateBytes, peak_bytes

GRADIENTS = StateBytes(parameter=0, gradient=4, optimizer=0)


class FirstOfTwo(OneRank):
    """The first of two ranks, whose sums lack the other's share: memory is the same."""

    members = (0, 1)

    def all_gather_rows(self, rows: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.cat((rows, rows))

    def all_gather_values(self, values: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.stack((values, values))


def workload_of(
    tokens: int, num_ranks: int, *, in_shards: bool = False, **shape: object
) -> Workload:
    layer = LayerShape(**shape)  # type: ignore[arg-type]  # sizes and an activation
    return Workload(
        layer=layer, world_size=num_ranks, tokens_per_rank=tokens, expert_parallel="tensor",
        sequence_parallel=in_shards,
    )  # fmt: skip


def layer_of(workload: Workload, degrees: tuple[int, int], *, bias: bool) -> TensorExpertLayer:
    shape = workload.layer
    layer = TensorExpertLayer(
        shape.d_model, shape.d_hidden, shape.num_experts, shape.top_k,
        activation=shape.activation, bias=bias,
        communicator=FirstOfTwo() if workload.world_size > 1 else OneRank(),
        sequence_parallel=workload.sequence_parallel,
    )  # fmt: skip
    layer.pin(Decision(forward_degree=degrees[0], backward_degree=degrees[1]))
    return layer


def train(layer: TensorExpertLayer, tokens: int) -> None:
    x = torch.randn(tokens, layer.shape.d_model, requires_grad=True)
    layer(x).backward(torch.randn(x.shape))
    layer.zero_grad()


@settings(deadline=None, max_examples=12)
@given(
    tokens=st.integers(32, 150),
    d_model=st.sampled_from([64, 96]),
    d_hidden=st.sampled_from([64, 160]),
    num_experts=st.sampled_from([2, 4]),
    is_alone=st.booleans(),
    in_shards=st.booleans(),
    activation=st.sampled_from(["relu", "gelu", "swiglu"]),
    bias=st.booleans(),
    degrees=st.tuples(st.integers(1, 6), st.integers(1, 6)),
)
def test_prediction_and_formula_are_the_account_of_a_step(
    *,
    tokens: int,
    d_model: int,
    d_hidden: int,
    num_experts: int,
    is_alone: bool,
    in_shards: bool,
    activation: Activation,
    bias: bool,
    degrees: tuple[int, int],
) -> None:
    # Every token goes to every expert, so that pairs are spread evenly over the ranks.
    workload = workload_of(
        2 * tokens, 1 if is_alone else 2, d_model=d_model, d_hidden=d_hidden,
        num_experts=num_experts, top_k=num_experts, activation=activation, in_shards=in_shards,
    )  # fmt: skip
    layer = layer_of(workload, degrees, bias=bias)
    train(layer, workload.own_tokens)
    train(layer, workload.own_tokens)
    peak = peak_bytes(
        workload=workload, forward_degree=degrees[0], backward_degree=degrees[1], bias=bias,
        states=GRADIENTS,
    )  # fmt: skip
    found = layer.memory.peak_device_bytes + 2 * 4 * workload.own_tokens * d_model
    assert abs(found - peak.device_bytes) <= max(peak.routing_bytes, 0.02 * found)
    memory = layer_memory(workload=workload, forward_degree=degrees[0], backward_degree=degrees[1])
    assert memory.activation_bytes == peak.activation_bytes
    assert memory.buffer_bytes == peak.buffer_bytes + peak.ring_bytes


@pytest.mark.parametrize(
    ("activation", "in_shards"), [("relu", False), ("swiglu", False), ("gelu", True)]
)
def test_account_and_prediction_are_the_peak_of_live_tensors(
    activation: Activation, *, in_shards: bool
) -> None:
    workload = workload_of(
        8192, 2, d_model=128, d_hidden=384, num_experts=2, top_k=2, activation=activation,
        in_shards=in_shards,
    )  # fmt: skip
    with live_tensors() as live:
        layer = layer_of(workload, (4, 4), bias=False)
        x = torch.randn(workload.own_tokens, 128, requires_grad=True)
        grad = torch.randn(x.shape)
        for _ in range(2):
            layer.zero_grad()
            x.grad = None
            layer(x).backward(grad)
        held = sum(each.nbytes for each in (x, grad, *layer.parameters()))
    account_bytes = layer.memory.peak_device_bytes + held
    predicted = peak_bytes(
        workload=workload, forward_degree=4, backward_degree=4, bias=False,
        states=StateBytes(parameter=4, gradient=4, optimizer=0),
    )  # fmt: skip
    assert account_bytes == pytest.approx(live.peak_bytes, rel=0.02)
    assert predicted.device_bytes == pytest.approx(live.peak_bytes, rel=0.02)
