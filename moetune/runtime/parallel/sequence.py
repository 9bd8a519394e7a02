"""Sequence parallelism: between tensor-parallel layers each rank has a shard of the tokens.

Norms, residual connections and layers of experts see (B, S / ranks, D). A column-parallel layer
gathers the whole sequence and a row-parallel one scatters its sums, so that a block sends what it
would in all-reduces (Korthikanti et al., 2022, §4.2.2). Only shards are kept for the backward pass,
which gathers the column-parallel input again.

Parameters that every rank has meet other tokens on each: their gradients are partial sums.

B sequences, S tokens each, s of them on this rank, D model width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from moetune.comm.group import Communicator
from moetune.comm.transfer import Transfer
from moetune.runtime.delayed import WeightGradients, add_gradient

_GATHER, _SCATTER = "the gathering of sequence shards", "the sums of sequence shards"


def shard_of(x_BSD: torch.Tensor, communicator: Communicator, dim: int = 1) -> torch.Tensor:
    """Return this rank's shard of what all ranks have."""
    return x_BSD.chunk(communicator.num_ranks, dim)[communicator.rank]


def linear_of_shards(
    x_BsD: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    communicator: Communicator,
    delayed: WeightGradients | None = None,
) -> torch.Tensor:
    """Return x·weightᵀ + bias for the whole sequence, of which each rank has a shard: (B, S, …).

    Args:
        delayed: where the gathering for the weight's gradient waits, and its product.
    """
    kind, parameter = x_BsD.device.type, weight
    if torch.is_autocast_enabled(kind):  # whose choice a function of one's own does not see
        dtype = torch.get_autocast_dtype(kind)
        x_BsD, weight, bias = x_BsD.to(dtype), weight.to(dtype), bias.to(dtype)
    y: torch.Tensor = _LinearOfShards.apply(  # type: ignore[no-untyped-call]
        x_BsD, weight, bias, communicator, None if delayed is None else (delayed, parameter)
    )
    return y


def sums_to_shards(x_BSD: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    """Return this rank's shard (B, s, D) of the sum over the ranks."""
    y: torch.Tensor = _SumsToShards.apply(x_BSD, communicator)  # type: ignore[no-untyped-call]
    return y


class _LinearOfShards(torch.autograd.Function):
    """A linear layer of a gathered sequence; backward, its gradient is summed into shards."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x_BsD: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        communicator: Communicator,
        delayed: tuple[WeightGradients, torch.Tensor] | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x_BsD, weight)
        ctx.communicator, ctx.delayed = communicator, delayed
        return functional.linear(_gathered(x_BsD, communicator), weight, bias)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        grad: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None]:
        x_BsD, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = gathering = scattering = None
        if ctx.needs_input_grad[1] and ctx.delayed is not None:
            waiting, parameter = ctx.delayed
            waiting.put_gathered(partial(_start_product, parameter, grad, x_BsD, ctx.communicator))
        elif ctx.needs_input_grad[1]:
            gathering = _Gathering(x_BsD, ctx.communicator)
        if ctx.needs_input_grad[0]:
            scattering = _Scattering(grad.matmul(weight), ctx.communicator)
        if gathering is not None:
            grad_weight = _grad_of_weight(grad, gathering)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.flatten(0, -2).sum(dim=0)
        if scattering is not None:
            grad_x = scattering.wait()
        return grad_x, grad_weight, grad_bias, None, None


class _SumsToShards(torch.autograd.Function):
    """This rank's shard of the sum over the ranks; backward, the gathered gradient."""

    @staticmethod
    def forward(ctx: Any, x_BSD: torch.Tensor, communicator: Communicator) -> torch.Tensor:  # noqa: ANN401
        ctx.communicator = communicator
        return _Scattering(x_BSD, communicator).wait()

    @staticmethod
    def backward(ctx: Any, grad_BsD: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        return _gathered(grad_BsD, ctx.communicator), None


class _Gathering:
    """An all-gather of shards that is under way."""

    def __init__(self, x_BsD: torch.Tensor, communicator: Communicator) -> None:
        shard = x_BsD.contiguous()
        self._parts = shard.new_empty((communicator.num_ranks, *shard.shape))
        self._transfer: Transfer = communicator.all_gather(self._parts, shard, _GATHER)

    def wait(self) -> torch.Tensor:
        """Return (B, S, D)."""
        self._transfer.wait()
        return self._parts.movedim(0, 1).flatten(1, 2)


class _Scattering:
    """A reduce-scatter of whole sequences that is under way."""

    def __init__(self, x_BSD: torch.Tensor, communicator: Communicator) -> None:
        ranks = communicator.num_ranks
        self._parts = x_BSD.unflatten(1, (ranks, -1)).movedim(1, 0).contiguous()
        self._shard = torch.empty_like(self._parts[0])
        self._transfer: Transfer = communicator.reduce_scatter(self._shard, self._parts, _SCATTER)

    def wait(self) -> torch.Tensor:
        """Return (B, s, D)."""
        self._transfer.wait()
        return self._shard


def _grad_of_weight(grad: torch.Tensor, gathering: _Gathering) -> torch.Tensor:
    return grad.flatten(0, -2).T.mm(gathering.wait().flatten(0, -2))


def _start_product(
    parameter: torch.Tensor, grad: torch.Tensor, x_BsD: torch.Tensor, communicator: Communicator
) -> Callable[[], None]:
    """Gather the input; return what adds the weight's gradient."""
    gathering = _Gathering(x_BsD, communicator)
    return lambda: add_gradient(parameter, _grad_of_weight(grad, gathering))


def _gathered(x_BsD: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    return _Gathering(x_BsD, communicator).wait()
