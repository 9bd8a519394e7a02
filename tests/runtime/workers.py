"""What ranks do in the tests of the layer."""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moetune.domain.constraints import Strategy
from moetune.domain.plan import Decision
from moetune.runtime.moe.layer import ExpertLayer, MoELayer
from tests.runtime.poison import poison
from tests.runtime.reference import Weights, dense_moe

D_MODEL, D_HIDDEN, NUM_EXPERTS = 6, 10, 12
RELATIVE = 1e-12
TOKENS = (13, 7, 0, 3)
AUX_SCALE = 0.1


def relative_error(actual: torch.Tensor, wanted: torch.Tensor) -> float:
    scale = max(float(wanted.detach().norm()), 1e-30)
    return float((actual - wanted).detach().norm()) / scale


def results_of(
    layer: nn.Module, x: torch.Tensor, dy: torch.Tensor | None = None, *, balance: float = 0.0
) -> list[torch.Tensor]:
    """Return a step's output, and the gradients of its input and of all parameters.

    Args:
        dy: gradient of the output; default, 2·y.
    """
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    loss = torch.sum(y.square() if dy is None else y * dy)
    (loss + balance * layer.aux_loss if balance else loss).backward()  # type: ignore[operator] # of a layer
    grads = [x.grad, *(parameter.grad for parameter in layer.parameters())]
    return [y.detach(), *(grad for grad in grads if grad is not None)]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """The dense reference of a step: this rank's inputs and outputs, and its tokens' gradients.

    Args:
        weights: with the gradients of all ranks' tokens.
        gate_grad: of this rank's tokens alone.
    """

    weights: Weights
    x: torch.Tensor
    dy: torch.Tensor
    y: torch.Tensor
    aux: torch.Tensor
    num_dropped: int
    x_grad: torch.Tensor
    gate_grad: torch.Tensor


def dense_of(layer: MoELayer, tokens: Sequence[int]) -> Dense:
    """Return the reference of a layer's weights; every degree and strategy has the same."""
    weights = all_weights(layer)
    loss: Any = 0
    steps = []
    for rank in range(_num_ranks()):
        x, dy = inputs_of(rank, tokens)
        x.requires_grad_()
        y, aux, dropped = dense_moe(
            x, weights, top_k=layer.shape.top_k, activation=layer.shape.activation,
            normalize=layer.gate.normalize_topk, capacity_factor=layer.gate.capacity_factor,
        )  # fmt: skip
        term = torch.sum(y * dy) + AUX_SCALE * aux
        (gate_grad,) = torch.autograd.grad(term, [weights.gate], retain_graph=True)
        steps.append((x, dy, y.detach(), aux.detach(), dropped, gate_grad))
        loss = loss + term
    loss.backward()
    x, dy, y, aux, dropped, gate_grad = steps[_rank()]
    assert x.grad is not None
    return Dense(
        weights=weights, x=x.detach(), dy=dy, y=y, aux=aux, num_dropped=dropped,
        x_grad=x.grad, gate_grad=gate_grad,
    )  # fmt: skip


def check_against_dense(layer: ExpertLayer, dense: Dense) -> None:
    """Hold output, aux loss and every gradient against the dense reference of these weights."""
    x = dense.x.clone().requires_grad_()
    y = layer(x)
    (torch.sum(y * dense.dy) + AUX_SCALE * layer.aux_loss).backward()

    assert relative_error(y, dense.y) <= RELATIVE
    assert relative_error(layer.aux_loss, dense.aux) <= RELATIVE
    assert layer.num_dropped == dense.num_dropped
    assert x.grad is not None
    assert relative_error(x.grad, dense.x_grad) <= RELATIVE
    assert layer.gate.weight.grad is not None
    assert torch.equal(layer.gate.weight, dense.weights.gate)
    assert relative_error(layer.gate.weight.grad, dense.gate_grad) <= RELATIVE
    rank, local = layer.communicator.rank, layer.experts.local_experts
    mine = slice(rank * local, (rank + 1) * local)
    for name, parameter in layer.experts.named_parameters():
        reference = getattr(dense.weights, name)
        assert parameter.grad is not None, name
        assert torch.equal(parameter, reference[mine]), name
        assert relative_error(parameter.grad, reference.grad[mine]) <= RELATIVE, name


class Heard(logging.Handler):
    """What this rank's log says, from warnings upwards."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("moetune").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def dense_matrix(
    activations: Sequence[str], degrees: Sequence[int], strategies: Sequence[Strategy] = ("none",)
) -> None:
    """Every strategy, degree, top_k, activation and capacity on this number of ranks.

    Where memory is reused buffers are poisoned, and there are two steps in a row.
    """
    references = dict[object, Dense]()
    grid = itertools.product(strategies, activations, (1, 2), (None, 0.7), degrees)
    for strategy, activation, top_k, capacity_factor, degree in grid:
        torch.manual_seed(5)
        layer = MoELayer(
            D_MODEL, D_HIDDEN, NUM_EXPERTS, top_k,
            activation=activation,  # type: ignore[arg-type]  # the grid holds plain strings
            capacity_factor=capacity_factor, memory_reuse=strategy, dtype=torch.float64,
        )  # fmt: skip
        layer.pin(Decision(forward_degree=degree, backward_degree=degree))
        case = (activation, top_k, capacity_factor)
        dense = references[case] = references.get(case) or dense_of(layer, TOKENS)
        if strategy != "none":
            poison(layer)
        for _ in range(1 if strategy == "none" else 2):
            layer.zero_grad()
            check_against_dense(layer, dense)


def reuse_matrix(activations: Sequence[str], degrees: Sequence[int]) -> None:
    """The same with every strategy that reuses memory."""
    dense_matrix(activations, degrees, ("S1", "S2", "S3", "S4"))
