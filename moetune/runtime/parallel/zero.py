"""Gradients of replicated parameters in buffers; their optimizer's states in shards (ZeRO-1).

A buffer has parameters of one dtype that the same ranks have. Without sharding its gradients
are summed by one all-reduce. With it they are reduce-scattered, each rank's optimizer updates a
part of the parameters, and an all-gather returns the whole: as many bytes, and 1 / ranks of the
optimizer's states (Rajbhandari et al., 2020, §5.1; Megatron-Core's distributed optimizer). The
all-gather runs beside the next forward pass; `arriving` has who waits for it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Protocol, TypeAlias

import torch
from torch import nn

from moetune.comm.group import Communicator
from moetune.comm.transfer import Transfer
from moetune.domain.errors import InputError

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes torch's optimizer of this rank's parameters, or of its parts of them."""
_ALIGNED_BYTES = 128
_MASTER_BYTES = 4
"""Parameters of fewer bytes are updated in copies of float32."""
_BY_ELEMENT = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_SUM = "the sum of the gradients"
Ranges: TypeAlias = Mapping[nn.Parameter, Sequence[slice]]
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

    def square(self, counted_elsewhere: Ranges) -> torch.Tensor:
        """Return Σ g² of `sums` in float64, but for what other ranks count."""
        total = torch.zeros((), dtype=torch.float64, device=self._grads.device)
        for one in self.sums:
            total += _square(one)
        for one in self._parts_of(counted_elsewhere):
            total -= _square(one)
        return total

    def _parts_of(self, ranges: Ranges) -> Iterator[torch.Tensor]:
        """Yield ranges of the parameters' gradients, as far as this rank has their sums."""
        first = self._mine.start if self.is_sharded else 0
        for parameter, start in zip(self._parameters, self._starts, strict=False):
            for one in ranges.get(parameter, ()):
                if self._has_buffer:
                    [sums] = self.sums
                    ends = (max(0, start + at - first) for at in (one.start, one.stop))
                    yield sums[slice(*ends)]
                elif parameter.grad is not None:
                    yield parameter.grad.reshape(-1)[one]

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


class Sharded(Protocol):
    """Parameters as the optimizer takes them."""

    @property
    def is_sharded(self) -> bool:
        """Whether each rank's optimizer has a part."""

    def pieces(self) -> Iterator[ShardPiece]:
        """Yield what this rank's optimizer updates."""

    def gather(self) -> None:
        """Start returning all ranks' parts of the parameters."""

    def wait(self) -> None:
        """Give the parameters the values of the last step, if they are still gathered."""


class BufferOptimizer:
    """An optimizer of buffers: torch's own, on this rank's parts.

    Parameters of two bytes are updated in copies of float32, which only this optimizer has.

    Args:
        behind: what gathers replicas of hot experts after each step; None without any.

    Attributes:
        inner: torch's optimizer, whose rates a scheduler may change.

    Raises:
        InputError: the optimizer of shards is none that works by element.
    """

    def __init__(
        self,
        buffers: Sequence[Sharded],
        make: MakeOptimizer,
        behind: Callable[[], None] | None = None,
    ) -> None:
        self._buffers, self._behind = buffers, behind
        self._pieces = [piece for buffer in buffers for piece in buffer.pieces()]
        self._parts = [_part(piece.values) for piece in self._pieces]
        self.inner = make(self._parts)
        if isinstance(self.inner, _BY_ELEMENT):
            return
        known, name = ", ".join(kind.__name__ for kind in _BY_ELEMENT), type(self.inner).__name__
        if any(buffer.is_sharded for buffer in buffers):
            raise InputError(
                f"{name} with a ZeRO stage, which cuts parameters anywhere",
                f"use one of {known}, or zero 0",
            )
        if behind is not None:
            raise InputError(
                f"{name} with replicas of hot experts, of which each rank updates a part",
                f"use one of {known}, or plan with --expert-placement once",
            )

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters; all ranks call this together.

        Shards are gathered until the next forward pass needs them.

        Raises:
            CollectiveError: a rank left.
        """
        for buffer in self._buffers:
            buffer.wait()
        for piece, part in zip(self._pieces, self._parts, strict=True):
            grad = piece.grad()
            part.grad = None if grad is None else grad.to(part.dtype)
        self.inner.step()
        for piece, part in zip(self._pieces, self._parts, strict=True):
            if part.dtype != piece.values.dtype:
                piece.values.copy_(part)
        for buffer in self._buffers:
            buffer.gather()
        if self._behind is not None:
            for buffer in self._buffers:
                buffer.wait()
            self._behind()


def _part(values: torch.Tensor) -> nn.Parameter:
    if values.element_size() < _MASTER_BYTES:
        return nn.Parameter(values.detach().float())
    return values if isinstance(values, nn.Parameter) else nn.Parameter(values)
