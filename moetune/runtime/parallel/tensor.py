"""Linear layers that are cut over a tensor-parallel group (Megatron-LM §3).

The blocks of `parallel.block` are built of these; `parallel.vocabulary` is around them. All ranks
give the same input, or with `sequence_parallel` their shards of it (`parallel.sequence`). A
column-parallel layer followed by a row-parallel one returns the same output on all, for one
all-reduce of the output forward and one of the input's gradient backward.

Parameters are plain tensors, not torch's DTensor: an optimizer cannot update those in one fused or
foreach call together with the plain ones of norms and experts.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from moetune.comm.group import Communicator, OneRank
from moetune.runtime.delayed import WeightGradients, add_gradient
from moetune.runtime.parallel.sequence import linear_of_shards, sums_to_shards

_GRADIENT = "the sum of a tensor-parallel gradient"


class TensorParallelModule(nn.Module):
    """A layer that is cut over the ranks of a group.

    Args:
        sequence_parallel: whether what all ranks would have is in shards of the sequence.

    Attributes:
        whole: sizes of the layer before it is cut.
        cut: names of the parameters of which each rank has a part, with the dimension.
        weight_gradients: where the weight's product waits in a backward pass; None for nowhere.
    """

    cut: ClassVar[Mapping[str, int]] = MappingProxyType({"weight": 0, "bias": 0})
    weight: nn.Parameter
    weight_gradients: WeightGradients | None = None

    def __init__(
        self, whole: tuple[int, int], communicator: Communicator, *, sequence_parallel: bool
    ) -> None:
        super().__init__()
        self.communicator = communicator
        self.whole = whole
        self.sequence_parallel = sequence_parallel and communicator.num_ranks > 1


class ColumnParallelLinear(TensorParallelModule):
    """A linear layer with outputs cut over the ranks: (…, in) to (…, out / ranks)."""

    def __init__(
        self, d_in: int, d_out: int, communicator: Communicator, *, sequence_parallel: bool = False
    ) -> None:
        super().__init__((d_in, d_out), communicator, sequence_parallel=sequence_parallel)
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
        linear = linear_of_shards if self.sequence_parallel else linear_of_copies
        return linear(x, self.weight, self.bias, self.communicator, self.weight_gradients)


class RowParallelLinear(TensorParallelModule):
    """A linear layer with inputs cut over the ranks: (…, in / ranks) to (…, out)."""

    cut: ClassVar[Mapping[str, int]] = MappingProxyType({"weight": 1})

    def __init__(
        self, d_in: int, d_out: int, communicator: Communicator, *, sequence_parallel: bool = False
    ) -> None:
        super().__init__((d_in, d_out), communicator, sequence_parallel=sequence_parallel)
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
        """Return the outputs, equal on all ranks, or this rank's shard of them."""
        bias = self.bias if self.communicator.num_ranks == 1 else None
        y = linear_of_copies(x, self.weight, bias, OneRank(), self.weight_gradients)
        if bias is not None:
            return y
        add = sums_to_shards if self.sequence_parallel else reduce_from_ranks
        return add(y, self.communicator) + self.bias


def linear_of_copies(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    communicator: Communicator,
    delayed: WeightGradients | None = None,
) -> torch.Tensor:
    """Return x·weightᵀ + bias for an x that all ranks have.

    Backward, the ranks' gradients of x are summed by an all-reduce, beside the weight's gradient.

    Args:
        delayed: where that gradient waits instead.
    """
    if communicator.num_ranks == 1 and delayed is None:
        return functional.linear(x, weight, bias)
    kind, parameter = x.device.type, weight
    if torch.is_autocast_enabled(kind):  # whose choice a function of one's own does not see
        dtype = torch.get_autocast_dtype(kind)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    y: torch.Tensor = _LinearOfCopies.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, communicator, None if delayed is None else (delayed, parameter)
    )
    return y


def reduce_from_ranks(x: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    """Return the sum over the ranks, in place of x; backward, return the gradient itself."""
    if communicator.num_ranks == 1:
        return x
    y: torch.Tensor = _ReduceFromRanks.apply(x, communicator)  # type: ignore[no-untyped-call]
    return y


class _LinearOfCopies(torch.autograd.Function):
    """A linear layer of an input that all ranks have; backward, the input's gradient is a sum.

    The sum travels while the weight's gradient is computed, as in Megatron-LM.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        communicator: Communicator,
        delayed: tuple[WeightGradients, torch.Tensor] | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.communicator, ctx.delayed = communicator, delayed
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        grad: torch.Tensor,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = transfer = None
        if ctx.needs_input_grad[0]:
            grad_x = grad.matmul(weight).contiguous()
            transfer = ctx.communicator.all_reduce(grad_x, _GRADIENT)
        if ctx.needs_input_grad[1] and ctx.delayed is not None:
            waiting, parameter = ctx.delayed
            waiting.put(lambda: add_gradient(parameter, _grad_of_weight(grad, x)))
        elif ctx.needs_input_grad[1]:
            grad_weight = _grad_of_weight(grad, x)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.flatten(0, -2).sum(dim=0)
        if transfer is not None:
            transfer.wait()
        return grad_x, grad_weight, grad_bias, None, None


class _ReduceFromRanks(torch.autograd.Function):
    """The sum over the ranks, in place; backward, the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, communicator: Communicator) -> torch.Tensor:  # noqa: ANN401
        ctx.mark_dirty(x)
        communicator.all_reduce(x, "the sum of a tensor-parallel output").wait()
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ANN401, ARG004
        return grad, None


def _grad_of_weight(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return grad.flatten(0, -2).T.mm(x.flatten(0, -2))


def _share(whole: torch.Tensor, dim: int, communicator: Communicator) -> torch.Tensor:
    return whole.chunk(communicator.num_ranks, dim)[communicator.rank]
