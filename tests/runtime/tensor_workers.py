"""What ranks do in the tests of the tensor-parallel experts."""

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from moetune.domain.errors import RankMismatchError
from moetune.domain.plan import Decision
from moetune.runtime.layer import MoELayer
from moetune.runtime.tensor_layer import TensorExpertLayer
from tests.runtime.reference import dense_moe
from tests.runtime.workers import (
    AUX_SCALE,
    D_HIDDEN,
    D_MODEL,
    NUM_EXPERTS,
    RELATIVE,
    all_weights,
    relative_error,
)


def tensor_layer(activation: str, top_k: int) -> TensorExpertLayer:
    torch.manual_seed(5)
    return TensorExpertLayer(
        D_MODEL,
        D_HIDDEN,
        NUM_EXPERTS,
        top_k,
        activation=activation,  # type: ignore[arg-type]  # the grid holds plain strings
        dtype=torch.float64,
    )


def same_inputs(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100)
    size = (num_tokens, D_MODEL)
    x, dy = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in "xy")
    return x, dy


def dense_matrix(activations: Sequence[str]) -> None:
    """Every activation, top_k and degree against the dense reference, on this number of ranks."""
    for activation, top_k, degree, num_tokens in itertools.product(
        activations, (1, 2), (1, 3, 5), (17, 2, 0)
    ):
        layer = tensor_layer(activation, top_k)
        layer.pin(Decision(forward_degree=degree, backward_degree=6 - degree))
        layer.poison_buffers()
        check_against_dense(layer, num_tokens)


def check_against_dense(layer: TensorExpertLayer, num_tokens: int) -> None:
    x, dy = same_inputs(num_tokens)
    x.requires_grad_()
    y = layer(x)
    (torch.sum(y * dy) + AUX_SCALE * layer.aux_loss).backward()

    weights = all_weights(layer)
    other_x, _ = same_inputs(num_tokens)
    other_x.requires_grad_()
    wanted, aux, _ = dense_moe(
        other_x, weights, top_k=layer.shape.top_k, activation=layer.shape.activation,
        normalize=layer.gate.normalize_topk, capacity_factor=None,
    )  # fmt: skip
    (torch.sum(wanted * dy) + AUX_SCALE * aux).backward()
    assert relative_error(y, wanted) <= RELATIVE
    assert x.grad is not None
    assert other_x.grad is not None
    assert relative_error(x.grad, other_x.grad) <= RELATIVE
    assert layer.gate.weight.grad is not None
    assert weights.gate.grad is not None
    assert relative_error(layer.gate.weight.grad, weights.gate.grad) <= RELATIVE
    rank, local = layer.link.rank, layer.experts.local_experts
    mine = slice(rank * local, (rank + 1) * local)
    for name, parameter in layer.experts.named_parameters():
        assert parameter.grad is not None, name
        assert relative_error(parameter.grad, getattr(weights, name).grad[mine]) <= RELATIVE, name


def checkpoints_fit_each_other() -> None:
    """The same weights in both kinds of layer make the same output and gradients."""
    torch.manual_seed(7)
    moe = MoELayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, 2, dtype=torch.float64, pipeline=2)
    torch.manual_seed(8)
    tensor = TensorExpertLayer(D_MODEL, D_HIDDEN, NUM_EXPERTS, 2, dtype=torch.float64, pipeline=3)
    tensor.load_state_dict(moe.state_dict())
    num_ranks, rank = moe.link.num_ranks, moe.link.rank
    x, dy = same_inputs(8 * num_ranks)
    mine = slice(8 * rank, 8 * rank + 8)
    sharded = x[mine].clone().requires_grad_()
    moe(sharded).backward(dy[mine])
    x.requires_grad_()
    tensor(x).backward(dy)
    assert x.grad is not None
    assert sharded.grad is not None
    assert relative_error(sharded.grad, x.grad[mine]) <= RELATIVE
    for (name, one), other in zip(
        moe.experts.named_parameters(), tensor.experts.parameters(), strict=True
    ):
        assert one.grad is not None
        assert other.grad is not None
        assert relative_error(one.grad, other.grad) <= RELATIVE, name
    gate_grad = moe.gate.weight.grad
    assert gate_grad is not None
    assert tensor.gate.weight.grad is not None
    if num_ranks > 1:
        dist.all_reduce(gate_grad)
    assert relative_error(gate_grad, tensor.gate.weight.grad) <= RELATIVE


def other_tokens_are_refused_everywhere() -> None:
    layer = tensor_layer("gelu", 1)
    with pytest.raises(RankMismatchError, match="tokens on every rank"):
        layer(torch.randn(3 + dist.get_rank(), D_MODEL, dtype=torch.float64))
