"""Quantized layers: emulated against dense float64, and on one and several ranks."""

import torch
import torch.distributed as dist

from moetune.comm.group import OneRank
from moetune.domain.layer import Activation
from moetune.domain.quantization import Quantization
from moetune.runtime.moe.layer import MoELayer
from tests.runtime.reference import Weights, dense_moe

ROWWISE = Quantization(
    forward="fp8_rowwise", grad_input="fp8_rowwise", grad_weights="fp8_rowwise", emulate=True
)
MX = Quantization(forward="mxfp8", grad_input="mxfp8", dispatch="mxfp8", emulate=True)
D_MODEL, D_HIDDEN, EXPERTS = 64, 96, 4


def layer_of(quantization: Quantization | str | None, activation: Activation = "gelu",
             dtype: torch.dtype = torch.float32, **options: object) -> MoELayer:  # fmt: skip
    torch.manual_seed(1)
    return MoELayer(
        D_MODEL, D_HIDDEN, EXPERTS, 2, activation=activation, quantization=quantization,
        dtype=dtype, **options,  # type: ignore[arg-type] # of the tests
    )  # fmt: skip


def run(layer: MoELayer, x: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the output and all gradients of one step."""
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(grad)
    assert x.grad is not None
    found = {"y": y.detach(), "x": x.grad}
    return found | {
        name: each.grad for name, each in layer.named_parameters() if each.grad is not None
    }


def dense(layer: MoELayer, x: torch.Tensor, grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what float64 gives."""
    names = ("w1", "b1", "w2", "b2", "w3")
    own = {"gate": layer.gate.weight} | {name: getattr(layer.experts, name) for name in names}
    values = {
        name: None if each is None else each.detach().double().requires_grad_()
        for name, each in own.items()
    }
    x = x.detach().double().requires_grad_()
    y, _, _ = dense_moe(
        x, Weights(**values), top_k=2, activation=layer.shape.activation, normalize=True,  # type: ignore[arg-type] # by name
        capacity_factor=None,
    )  # fmt: skip
    y.backward(grad.double())
    found = {"y": y.detach(), "x": x.grad, "gate.weight": values.pop("gate").grad}  # type: ignore[union-attr] # is there
    found |= {f"experts.{name}": v.grad for name, v in values.items() if v is not None}
    return found


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def ranks_equal_one_rank() -> None:
    """Uneven tokens on each rank; rank 1 routes few tokens to some experts."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(50, D_MODEL, generator=generator)
    grad = torch.randn(50, D_MODEL, generator=generator)
    mine = slice(0, 31) if rank == 0 else slice(31, 50)
    for recipe in (ROWWISE, MX):
        found = run(layer_of(recipe, pipeline=3), x[mine], grad[mine])
        wanted = run(layer_of(recipe, communicator=OneRank()), x, grad)
        exact = run(layer_of(None, communicator=OneRank()), x, grad)
        local = EXPERTS // num_ranks
        experts = slice(rank * local, (rank + 1) * local)
        for name, each in found.items():
            if name == "gate.weight":
                continue  # of this rank's tokens alone
            part = mine if name in {"y", "x"} else experts
            # Sums in another order move few values over a rounding boundary.
            assert error(each, wanted[name][part]) < 3e-3, name
            if name != "experts.b2":
                assert error(each, exact[name][part]) > 1e-2, name
