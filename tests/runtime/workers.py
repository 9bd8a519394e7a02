"""What ranks do in the tests of the layer."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from moetune.domain.plan import Decision
from moetune.runtime.moe.expert_layer import ExpertLayer
from moetune.runtime.moe.layer import MoELayer
from tests.runtime.reference import Weights, dense_moe

D_MODEL, D_HIDDEN, NUM_EXPERTS = 6, 10, 12
RELATIVE = 1e-12
TOKENS = (13, 7, 0, 3)
AUX_SCALE = 0.1


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    scale = max(float(wanted.detach().norm()), 1e-30)
    return float((found - wanted).detach().norm()) / scale


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def all_weights(layer: ExpertLayer) -> Weights:
    """Return every rank's experts as leaves of the reference."""

    def whole(value: torch.Tensor | None) -> torch.Tensor | None:
        if value is None:
            return None
        parts = [torch.empty_like(value) for _ in range(_num_ranks())]
        if _num_ranks() == 1:
            parts = [value.detach()]
        else:
            dist.all_gather(parts, value.detach().contiguous())
        return torch.cat(parts).clone().requires_grad_()

    experts = layer.experts
    w1, w2 = whole(experts.w1), whole(experts.w2)
    assert w1 is not None
    assert w2 is not None
    return Weights(
        gate=layer.gate.weight.detach().clone().requires_grad_(),
        w1=w1,
        b1=whole(experts.b1),
        w2=w2,
        b2=whole(experts.b2),
        w3=whole(experts.w3),
    )


def inputs_of(rank: int, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(tokens[rank], D_MODEL, generator=generator, dtype=torch.float64)
    dy = torch.randn(tokens[rank], D_MODEL, generator=generator, dtype=torch.float64)
    return x, dy


def check_against_dense(layer: MoELayer, tokens: Sequence[int]) -> None:
    """Hold output, aux loss and every gradient against the dense reference."""
    rank, num_ranks = _rank(), _num_ranks()
    x, dy = inputs_of(rank, tokens)
    x.requires_grad_()
    y = layer(x)
    (torch.sum(y * dy) + AUX_SCALE * layer.aux_loss).backward()

    weights = all_weights(layer)
    loss: Any = 0
    gate_grads, wanted_x = [], x
    for other in range(num_ranks):
        other_x, other_dy = inputs_of(other, tokens)
        other_x.requires_grad_()
        wanted, aux, dropped = dense_moe(
            other_x,
            weights,
            top_k=layer.shape.top_k,
            activation=layer.shape.activation,
            normalize=layer.gate.normalize_topk,
            capacity_factor=layer.gate.capacity_factor,
        )
        term = torch.sum(wanted * other_dy) + AUX_SCALE * aux
        gate_grads.append(torch.autograd.grad(term, weights.gate, retain_graph=True)[0])
        loss = loss + term
        if other == rank:
            wanted_x = other_x
            assert relative_error(y, wanted) <= RELATIVE
            assert relative_error(layer.aux_loss, aux) <= RELATIVE
            assert layer.num_dropped == dropped
    loss.backward()

    assert x.grad is not None
    assert wanted_x.grad is not None
    assert relative_error(x.grad, wanted_x.grad) <= RELATIVE
    assert layer.gate.weight.grad is not None
    assert relative_error(layer.gate.weight.grad, gate_grads[rank]) <= RELATIVE
    local = NUM_EXPERTS // num_ranks
    mine = slice(rank * local, (rank + 1) * local)
    for name, parameter in layer.experts.named_parameters():
        reference = getattr(weights, name).grad
        assert parameter.grad is not None, name
        assert relative_error(parameter.grad, reference[mine]) <= RELATIVE, name


def dense_matrix(activations: Sequence[str], degrees: Sequence[int]) -> None:
    """Every degree, top_k, activation and capacity on this number of ranks."""
    tokens = TOKENS
    grid = itertools.product(activations, (1, 2), (None, 0.7), degrees)
    for activation, top_k, capacity_factor, degree in grid:
        backward_degree = degree if degree % 2 else 9 - degree
        torch.manual_seed(5)
        layer = MoELayer(
            D_MODEL,
            D_HIDDEN,
            NUM_EXPERTS,
            top_k,
            activation=activation,  # type: ignore[arg-type]  # the grid holds plain strings
            capacity_factor=capacity_factor,
            dtype=torch.float64,
        )
        layer.pin(Decision(forward_degree=degree, backward_degree=backward_degree))
        check_against_dense(layer, tokens)


def reuse_matrix(activations: Sequence[str], degrees: Sequence[int]) -> None:
    """Every strategy that reuses memory, with poisoned buffers, twice in a row."""
    strategies = ("S1", "S2", "S3", "S4")
    grid = itertools.product(strategies, activations, (1, 2), (None, 0.7), degrees)
    for strategy, activation, top_k, capacity_factor, degree in grid:
        backward_degree = degree if degree % 2 else 9 - degree
        torch.manual_seed(5)
        layer = MoELayer(
            D_MODEL,
            D_HIDDEN,
            NUM_EXPERTS,
            top_k,
            activation=activation,  # type: ignore[arg-type]  # the grid holds plain strings
            capacity_factor=capacity_factor,
            memory_reuse=strategy,
            dtype=torch.float64,
        )
        layer.poison_buffers()
        layer.pin(Decision(forward_degree=degree, backward_degree=backward_degree))
        for _ in range(2):
            layer.zero_grad()
            check_against_dense(layer, TOKENS)
