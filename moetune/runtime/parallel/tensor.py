"""Linear layers cut over a tensor-parallel group: columns first, then rows (Megatron-LM §3).

All ranks give the same input and get the same output; between the two layers each has its own
share. The pair costs one all-reduce of the output forward and one of the input's gradient
backward. Parameters are plain tensors, not torch's DTensor: an optimizer cannot update those
in one fused or foreach call together with the plain ones of norms and experts.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from moetune.comm.group import Communicator


class ColumnParallelLinear(nn.Module):
    """A linear layer whose outputs are cut over the ranks: (…, in) to (…, out / ranks)."""

    def __init__(self, d_in: int, d_out: int, communicator: Communicator) -> None:
        super().__init__()
        self.communicator = communicator
        self.whole = d_in, d_out
        self.weight = nn.Parameter(torch.empty(d_out // communicator.num_ranks, d_in))
        self.bias = nn.Parameter(torch.empty(d_out // communicator.num_ranks))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the whole layer as `nn.Linear` does and keep this rank's share."""
        whole = nn.Linear(*self.whole, dtype=self.weight.dtype, device="cpu")
        with torch.no_grad():
            self.weight.copy_(_share(whole.weight, 0, self.communicator))
            self.bias.copy_(_share(whole.bias, 0, self.communicator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's outputs."""
        return functional.linear(copy_to_ranks(x, self.communicator), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer whose inputs are cut over the ranks: (…, in / ranks) to (…, out)."""

    def __init__(self, d_in: int, d_out: int, communicator: Communicator) -> None:
        super().__init__()
        self.communicator = communicator
        self.whole = d_in, d_out
        self.weight = nn.Parameter(torch.empty(d_out, d_in // communicator.num_ranks))
        self.bias = nn.Parameter(torch.empty(d_out))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the whole layer as `nn.Linear` does and keep this rank's share."""
        whole = nn.Linear(*self.whole, dtype=self.weight.dtype, device="cpu")
        with torch.no_grad():
            self.weight.copy_(_share(whole.weight, 1, self.communicator))
            self.bias.copy_(whole.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs, equal on all ranks."""
        if self.communicator.num_ranks == 1:
            return functional.linear(x, self.weight, self.bias)
        return reduce_from_ranks(functional.linear(x, self.weight), self.communicator) + self.bias


def copy_to_ranks(x: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    """Return the same values; backward, the ranks' gradients are summed (all-reduce)."""
    if communicator.num_ranks == 1:
        return x
    y: torch.Tensor = _CopyToRanks.apply(x, communicator)  # type: ignore[no-untyped-call]
    return y


def reduce_from_ranks(x: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    """Return the ranks' values summed in place; backward, the gradient is the same on all."""
    if communicator.num_ranks == 1:
        return x
    y: torch.Tensor = _ReduceFromRanks.apply(x, communicator)  # type: ignore[no-untyped-call]
    return y


class _CopyToRanks(torch.autograd.Function):
    """The same values; backward, the ranks' gradients summed.

    The sum is made in the gradient's own memory: the GEMM behind it is its only reader.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, communicator: Communicator) -> torch.Tensor:  # noqa: ANN401
        ctx.communicator = communicator
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401
        grad = grad.contiguous()
        ctx.communicator.all_reduce(grad, "the sum of a tensor-parallel gradient").wait()
        return grad, None


class _ReduceFromRanks(torch.autograd.Function):
    """The ranks' values summed in place; backward, the same gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, communicator: Communicator) -> torch.Tensor:  # noqa: ANN401
        ctx.mark_dirty(x)
        communicator.all_reduce(x, "the sum of a tensor-parallel output").wait()
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401, ARG004
        return grad, None


def _share(whole: torch.Tensor, dim: int, communicator: Communicator) -> torch.Tensor:
    return whole.chunk(communicator.num_ranks, dim)[communicator.rank]
