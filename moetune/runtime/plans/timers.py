"""Time calls of a layer while it trains, for the trials of the `online` search.

`ExpertLayer.forward` starts and ends a timer around its pipelined part, and an autograd hook times
the backward pass. On a GPU, events are recorded in the stream and read between two steps, so that
nothing waits within a step.
"""

from collections.abc import Callable

import torch

from moetune.domain.layer import Phase
from moetune.runtime.trace import Stamp, stamp_now

Clock = Callable[[Phase, torch.device], Stamp]
"""A function that stamps the beginning or the end of a phase."""


def device_clock(phase: Phase, device: torch.device) -> Stamp:  # noqa: ARG001 - a `Clock`
    """Return the host's time, or an event of the device's current stream."""
    return stamp_now(device)


class Watch:
    """The timer of an untimed call, which does nothing."""

    def begin(self) -> None:
        """Begin the forward pass of the pipelined part."""

    def end_forward(self, y_TD: torch.Tensor) -> None:
        """End the forward pass, and time the backward pass of the operation that gave `y_TD`."""

    def note_forward(self) -> None:
        """End a forward pass that a backward pass will follow."""

    def begin_backward(self) -> None:
        """Begin the backward pass."""

    def end_backward(self) -> None:
        """End the backward pass."""


class CallWatch(Watch):
    """A timer of one call, forward and backward.

    Args:
        tokens_per_rank: the group's agreed number of tokens.
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
        self.tokens_per_rank, self._is_complete = tokens_per_rank, False
        self._clock, self._device, self._note = clock, device, note
        self._forward: list[Stamp] = []
        self._backward: list[Stamp] = []

    def begin(self) -> None:
        """Begin the forward pass of the pipelined part."""
        self._forward = [self._clock("forward", self._device)]

    def end_forward(self, y_TD: torch.Tensor) -> None:
        """End the forward pass, and time the autograd node that computed `y_TD`."""
        node = y_TD.grad_fn
        if node is None:
            return
        node.register_prehook(lambda _: self.begin_backward())
        node.register_hook(lambda *_: self.end_backward())
        self.note_forward()

    def note_forward(self) -> None:
        """End a forward pass that a backward pass will follow."""
        self._forward.append(self._clock("forward", self._device))
        self._note(self)

    def seconds(self) -> tuple[float, float] | None:
        """Return the forward and backward times; None if the backward pass has not ended."""
        if not self._is_complete:
            return None
        (begin, end), (begin_back, end_back) = self._forward, self._backward
        return end.since(begin), end_back.since(begin_back)

    # A retained graph may run backward again: only its first pass counts.

    def begin_backward(self) -> None:
        """Begin the backward pass; only the first call counts."""
        if not self._is_complete:
            self._backward = [self._clock("backward", self._device)]

    def end_backward(self) -> None:
        """End the backward pass; only the first call counts."""
        if self._backward and not self._is_complete:
            self._backward.append(self._clock("backward", self._device))
            self._is_complete = True
