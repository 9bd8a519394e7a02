"""Gradients of replicated parameters in buffers, and their values in shards (ZeRO-1).

A buffer has parameters of one dtype that the same ranks have. Without sharding its gradients
are summed by one all-reduce. With it they are reduce-scattered, each rank's optimizer updates a
part of the parameters, and an all-gather returns the whole: as many bytes, and 1 / ranks of the
optimizer's states (Rajbhandari et al., 2020, §5.1; Megatron-Core's distributed optimizer). The
all-gather runs beside the next forward pass; `arriving` has who waits for it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import nn

from moetune.comm.group import Communicator
from moetune.comm.transfer import Transfer

_ALIGNED_BYTES = 128
_SUM = "the sum of the gradients"
"""Of the values of parameters, flat."""


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """A part of a parameter that this rank's optimizer updates, and its gradient."""

    values: torch.Tensor
    grad: Callable[[], torch.Tensor | None]


class ParameterBuffer:
    """Parameters that the same ranks have, with their gradients in one buffer.

    One rank alone needs no buffer: its gradients are the parameters' own.

    Args:
        parameters: of one dtype, in the same order on all ranks.
        communicator: the ranks with replicas of the parameters.
        copies: ranks of the world that have the same parameters.
        is_sharded: whether each rank's optimizer has a part. The parameters' values then become
            views of one tensor.

    Attributes:
        copies: ranks of the world that have the same `sums`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        communicator: Communicator,
        *,
        copies: int,
        is_sharded: bool,
    ) -> None:
        self._communicator, ranks = communicator, communicator.num_ranks
        self.is_sharded = is_sharded and ranks > 1
        self.copies = copies // ranks if self.is_sharded else copies
        unit = _ALIGNED_BYTES // parameters[0].element_size()
        sizes = [-(-parameter.numel() // unit) * unit for parameter in parameters]
        self._starts = [0, *accumulate(sizes)]
        length = -(-self._starts[-1] // (unit * ranks)) * unit * ranks if ranks > 1 else 0
        self._parameters, self._has_buffer = parameters, ranks > 1
        self._grads = torch.zeros(length, dtype=parameters[0].dtype, device=parameters[0].device)
        each = length // ranks
        self._mine = slice(communicator.rank * each, (communicator.rank + 1) * each)
        self._arriving: Transfer | None = None
        if self.is_sharded:
            self._total = torch.zeros_like(self._grads[self._mine])
            self._values = torch.zeros_like(self._grads)
            self._whole = self._views(self._values)
            self._absent = [
                parameter.detach().new_full((), torch.nan).expand(parameter.shape)
                for parameter in parameters
            ]
            for parameter, view in zip(parameters, self._whole, strict=True):
                view.copy_(parameter.detach())
                parameter.data = view

    @property
    def has_replicas(self) -> bool:
        """Whether there are several ranks, which sum their gradients."""
        return self._has_buffer

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters, in the order of the buffer."""
        return self._parameters

    def begin(self) -> None:
        """Zero the buffer and make the parameters' gradients its views; without one, drop them."""
        if not self._has_buffer:
            for parameter in self._parameters:
                parameter.grad = None
            return
        self._grads.zero_()
        for parameter, view in zip(self._parameters, self._views(self._grads), strict=True):
            parameter.grad = view

    def reduce(self) -> Transfer:
        """Start summing the ranks' gradients; of shards, into this rank's."""
        if self.is_sharded:
            return self._communicator.reduce_scatter(self._total, self._grads, _SUM)
        return self._communicator.all_reduce(self._grads, _SUM)

    @property
    def sums(self) -> list[torch.Tensor]:
        """The summed gradients that this rank has."""
        if not self._has_buffer:
            return [one.grad for one in self._parameters if one.grad is not None]
        return [self._total if self.is_sharded else self._grads]

    def square(self) -> torch.Tensor:
        """Return Σ g² of `sums` in float64."""
        total = torch.zeros((), dtype=torch.float64, device=self._grads.device)
        for one in self.sums:
            total += _square(one)
        return total

    def pieces(self) -> Iterator[ShardPiece]:
        """Yield what this rank's optimizer updates: parameters, or its parts of them."""
        if not self.is_sharded:
            yield from map(_whole, self._parameters)
            return
        for parameter, start in zip(self._parameters, self._starts, strict=False):
            low, high = self._mine.start, self._mine.stop
            own = slice(max(start, low), min(start + parameter.numel(), high))
            if own.start < own.stop:
                grad = self._total[own.start - low : own.stop - low]
                yield ShardPiece(self._values[own], partial(_same, grad))

    def gather(self) -> None:
        """Start returning all ranks' parts of the parameters, which are NaN until `wait`."""
        if self.is_sharded:
            own = self._values[self._mine].clone()
            self._arriving = self._communicator.all_gather(
                self._values, own, "the updated parameters"
            )
            self._point_to(self._absent)

    def wait(self) -> None:
        """Give the parameters their new values, if they are still gathered.

        Raises:
            CollectiveError: a rank left.
        """
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None
            self._point_to(self._whole)

    def _point_to(self, values: Sequence[torch.Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data = value

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat[start : start + parameter.numel()].view_as(parameter)
            for parameter, start in zip(self._parameters, self._starts, strict=False)
        ]


def _square(values: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm.square()


def _same(grad: torch.Tensor) -> torch.Tensor:
    return grad


def _whole(parameter: nn.Parameter) -> ShardPiece:
    return ShardPiece(parameter, lambda: parameter.grad)


def parameter_buffers(
    parameters: Iterable[nn.Parameter],
    communicator: Communicator,
    *,
    copies: int,
    is_sharded: bool,
) -> list[ParameterBuffer]:
    """Return one buffer for every dtype of the parameters that have gradients."""
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
    return [
        ParameterBuffer(same, communicator, copies=copies, is_sharded=is_sharded)
        for same in by_dtype.values()
    ]
