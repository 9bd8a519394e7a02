"""How long a layer's pipelined part takes, forward and backward, measured while it trains.

On a GPU events are recorded in the stream and read later, between two steps: nothing waits
inside of one.
"""

import time
from collections.abc import Callable
from typing import Protocol

import torch

from moetune.domain.layer import Phase


class Interval(Protocol):
    """A time that has begun."""

    def end(self) -> None:
        """Take the end: now, or on a GPU when the stream gets here."""
        ...

    def is_over(self) -> bool:
        """Return whether `seconds` needs not wait; asked after `end`."""
        ...

    def seconds(self) -> float:
        """Return how long it was; on a GPU this waits for the end."""
        ...


Clock = Callable[[Phase, torch.device], Interval]
"""Begins an interval."""


def device_clock(phase: Phase, device: torch.device) -> Interval:  # noqa: ARG001 - a `Clock`
    """Begin an interval on the host's clock, or in the device's current stream."""
    return _CudaInterval() if device.type == "cuda" else _HostInterval()


class _HostInterval:
    def __init__(self) -> None:
        self._start = self._end = time.perf_counter()

    def end(self) -> None:
        self._end = time.perf_counter()

    def is_over(self) -> bool:
        return True

    def seconds(self) -> float:
        return self._end - self._start


class _CudaInterval:
    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._start.record()

    def end(self) -> None:
        self._end.record()

    def is_over(self) -> bool:
        return bool(self._end.query())

    def seconds(self) -> float:
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3


class Watch(Protocol):
    """Times one call of a layer."""

    def begin(self) -> None:
        """Begin the forward pass of the pipelined part."""
        ...

    def follow(self, y_TD: torch.Tensor) -> None:
        """End it; the backward pass of what made `y_TD` will be timed too."""
        ...


class NoWatch:
    """Times nothing."""

    def begin(self) -> None:
        """Do nothing."""

    def follow(self, y_TD: torch.Tensor) -> None:
        """Do nothing."""


class CallWatch:
    """Times one call.

    Args:
        note: told of the call when its forward pass ends, unless no gradient can follow.
        tokens_per_rank: the group's agreed number.
    """

    def __init__(
        self,
        clock: Clock,
        device: torch.device,
        *,
        tokens_per_rank: int,
        note: Callable[["CallWatch"], None],
    ) -> None:
        self.tokens_per_rank = tokens_per_rank
        self._clock, self._device, self._note = clock, device, note
        self._forward: Interval | None = None
        self._backward: Interval | None = None
        self._is_complete = False

    def begin(self) -> None:
        """Begin the forward pass of the pipelined part."""
        self._forward = self._clock("forward", self._device)

    def follow(self, y_TD: torch.Tensor) -> None:
        """End it, and watch the node of the graph that made `y_TD`."""
        node = y_TD.grad_fn
        if self._forward is None or node is None:
            return
        self._forward.end()
        node.register_prehook(self._begin_backward)
        node.register_hook(self._end_backward)
        self._note(self)

    def is_over(self) -> bool:
        """Return whether the backward pass has ended, on a GPU there, too."""
        return self._is_complete and self._backward is not None and self._backward.is_over()

    def seconds(self) -> tuple[float, float] | None:
        """Return forward and backward, None while the backward pass has not ended."""
        if not self._is_complete or self._forward is None or self._backward is None:
            return None
        return self._forward.seconds(), self._backward.seconds()

    def _begin_backward(self, _: object) -> None:
        if not self._is_complete:
            self._backward = self._clock("backward", self._device)

    def _end_backward(self, *_: object) -> None:
        if self._backward is not None and not self._is_complete:
            self._backward.end()
            self._is_complete = True
