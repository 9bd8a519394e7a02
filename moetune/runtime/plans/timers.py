"""Time calls of a layer while it trains, for the online `search` and the `reports` to a service.

`ExpertLayer.forward` starts and ends a timer around its pipelined part; a hook of autograd times
the backward pass. On a GPU events are recorded in the stream and read between two steps, so that
nothing waits within one.
"""

import time
from collections.abc import Callable
from typing import Protocol

import torch

from moetune.domain.layer import Phase


class Interval(Protocol):
    """A time measurement of one phase."""

    def end(self) -> None:
        """End the interval: now, or on a GPU when the stream gets here."""

    def is_over(self) -> bool:
        """Return whether `seconds` returns without waiting; called after `end`."""

    def seconds(self) -> float:
        """Return the measured time; on a GPU this waits for the end."""


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
    """A timer of one call of a layer."""

    def begin(self) -> None:
        """Begin the forward pass of the pipelined part."""

    def end_forward(self, y_TD: torch.Tensor) -> None:
        """End the forward pass, and time the backward pass of the operation that made `y_TD`."""


class NoWatch:
    """The timer of a call that is not timed."""

    def begin(self) -> None:
        """Do nothing."""

    def end_forward(self, y_TD: torch.Tensor) -> None:
        """Do nothing."""


class CallWatch:
    """A timer of one call, forward and backward.

    Args:
        tokens_per_rank: the group's agreed number.
        note: called with this timer when the forward pass ends, if a backward pass can follow.
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

    def end_forward(self, y_TD: torch.Tensor) -> None:
        """End the forward pass, and time the autograd node that made `y_TD`."""
        node = y_TD.grad_fn
        if self._forward is None or node is None:
            return
        self._forward.end()
        node.register_prehook(self._begin_backward)
        node.register_hook(self._end_backward)
        self._note(self)

    def is_over(self) -> bool:
        """Return whether the backward pass has ended, on a GPU as well."""
        return self._is_complete and self._backward is not None and self._backward.is_over()

    def seconds(self) -> tuple[float, float] | None:
        """Return the forward and backward times, None while the backward pass has not ended."""
        if not self._is_complete or self._forward is None or self._backward is None:
            return None
        return self._forward.seconds(), self._backward.seconds()

    # A retained graph may run backward again: only its first pass counts.

    def _begin_backward(self, _: object) -> None:
        if not self._is_complete:
            self._backward = self._clock("backward", self._device)

    def _end_backward(self, *_: object) -> None:
        if self._backward is not None and not self._is_complete:
            self._backward.end()
            self._is_complete = True
