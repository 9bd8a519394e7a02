"""What ranks do in the tests of layers whose ranks share their experts' widths."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from moetune.comm.group import OneRank
from moetune.domain.layer import Activation
from moetune.domain.plan import Decision
from moetune.runtime.moe.layer import MoELayer
from tests.runtime.reference import Weights, dense_moe
from tests.runtime.workers import AUX_SCALE, RELATIVE, TOKENS, relative_error

D_MODEL, D_HIDDEN, NUM_EXPERTS = 8, 12, 4


def made(etp: int, activation: Activation, **options: Any) -> MoELayer:
    """Return a layer of which so many consecutive ranks share each expert's width."""
    torch.manual_seed(5)
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // etp, etp), mesh_dim_names=("experts", "width"))
    return MoELayer(
        D_MODEL, D_HIDDEN, NUM_EXPERTS, activation=activation, dtype=torch.float64, width=mesh,
        **options,
    )  # fmt: skip


def alone(activation: Activation, top_k: int = 1) -> MoELayer:
    """Return the same layer of one process."""
    torch.manual_seed(5)
    return MoELayer(
        D_MODEL, D_HIDDEN, NUM_EXPERTS, top_k, activation=activation, dtype=torch.float64,
        communicator=OneRank(),
    )  # fmt: skip


def whole(value: object) -> torch.Tensor:
    """Return all ranks' values of an entry of a state dict."""
    assert isinstance(value, DTensor)
    return value.full_tensor()


def layers_equal_dense(etp: int, activations: Sequence[Activation], degrees: Sequence[int]) -> None:
    """Hold outputs, and gradients of everything, against experts that are whole."""
    options = itertools.product(activations, (1, 2), (None, 0.7), degrees, ("none", "S1", "padded"))
    for activation, top_k, capacity, degree, how in options:
        pads = how == "padded"
        if pads and capacity is None:
            continue
        tokens = (7,) * len(TOKENS) if pads else TOKENS
        layer = made(
            etp, activation, top_k=top_k, capacity_factor=capacity,
            memory_reuse="none" if pads else how, pad_to_capacity=pads,
        )  # fmt: skip
        layer.pin(Decision(forward_degree=degree, backward_degree=4 - degree))
        reference = alone(activation, top_k)
        for name, value in layer.experts.state_dict().items():
            assert torch.equal(whole(value), reference.experts.state_dict()[name]), name
        for _ in range(2):  # counts of the second step travel with the opening
            layer.zero_grad()
            _check(layer, reference, tokens, capacity)


def _check(
    layer: MoELayer, reference: MoELayer, tokens: Sequence[int], capacity: float | None
) -> None:
    weights = _weights(reference)
    total: torch.Tensor | float = 0.0
    mine = None
    for rank in range(dist.get_world_size()):
        x, dy = _tokens(rank, tokens)
        y, aux, dropped = dense_moe(
            x, weights, top_k=layer.shape.top_k, activation=layer.shape.activation,
            normalize=layer.gate.normalize_topk, capacity_factor=capacity,
        )  # fmt: skip
        loss = (y * dy).sum() + AUX_SCALE * aux
        if rank == dist.get_rank():
            gate_grad = torch.autograd.grad(loss, weights.gate, retain_graph=True)[0]
            mine = x, y, aux, dropped, gate_grad
        total = total + loss
    assert isinstance(total, torch.Tensor)
    total.backward()
    assert mine is not None
    wanted_x, wanted_y, aux, dropped, gate_grad = mine
    x, dy = _tokens(dist.get_rank(), tokens)
    y = layer(x)
    ((y * dy).sum() + AUX_SCALE * layer.aux_loss).backward()
    _same(y, wanted_y)
    _same(x.grad, wanted_x.grad)
    _same(layer.aux_loss, aux)
    assert layer.num_dropped == dropped
    _same(layer.gate.weight.grad, gate_grad)
    placement = layer.experts.placement
    for name, parameter in layer.experts.named_parameters():
        grad = getattr(weights, name).grad
        _same(parameter.grad, placement.own(name, grad))


def _weights(layer: MoELayer) -> Weights:
    found: dict[str, Any] = {"b1": None, "b2": None, "w3": None}
    for name, value in (*layer.experts.named_parameters(), ("gate", layer.gate.weight)):
        found[name] = value.detach().clone().requires_grad_()
    return Weights(**found)


def _tokens(rank: int, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    size = tokens[rank], D_MODEL
    x = torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True)
    return x, torch.randn(size, generator=generator, dtype=torch.float64)


def _same(found: torch.Tensor | None, wanted: torch.Tensor | None) -> None:
    assert found is not None
    assert wanted is not None
    assert relative_error(found, wanted) <= RELATIVE
