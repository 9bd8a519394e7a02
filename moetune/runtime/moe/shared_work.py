"""Work of shared experts behind the exchanges: the expert function, cut where its rows leave.

A token's way to the wire: as in `function`, whose helpers and phases these are. Work that does not
need the experts' results, such as shared experts, is ordinary autograd between two functions:

    forward     Leave: rows leave | the work | ExpertFunction: experts, combine
    backward    ExpertFunction: all but the wait for the last results | the work | Leave: that wait

Autograd runs what was made last first, so that the backward pass has this order by itself.

T tokens, K choices, D model width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from moetune.domain.errors import InputError
from moetune.runtime.moe.executor import leading
from moetune.runtime.moe.function import (
    Crossing,
    ExpertFunction,
    MemoryPolicy,
    during,
    start_forward,
)
from moetune.runtime.selective import HiddenModes

Work = Callable[[], None]
"""Work that neither needs the experts' results nor exchanges anything with their ranks."""
SharedWork = Callable[[], torch.Tensor]
"""Gives what shared experts make of a layer's input, shaped as it."""


def run_experts(
    x_TD: torch.Tensor,
    weights_TK: torch.Tensor,
    policy: MemoryPolicy,
    parameters: Sequence[Any],
    work: Work | None,
) -> torch.Tensor:
    """Return Σₖ weightₖ · expertₖ(x) of this step's routing (T, D).

    Args:
        parameters: as of `ExpertFunction`.
        work: runs behind the first dispatches, and its backward pass behind the last combine.
    """
    left, crossing = x_TD, None
    if work is not None:
        crossing = Crossing(policy)
        left = _Leave.apply(x_TD, weights_TK, crossing, parameters)  # type: ignore[no-untyped-call]
        weights_TK = weights_TK.detach()  # whose gradient `_Leave` returns
        with during(policy, "the work behind a dispatch"):
            work()
    y_TD: torch.Tensor = ExpertFunction.apply(  # type: ignore[no-untyped-call]
        left, weights_TK, policy, crossing, *parameters
    )
    return y_TD


class _Leave(torch.autograd.Function):
    """Sends the rows of the first chunks."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context has no public type
        x_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        crossing: Crossing,
        parameters: Sequence[Any],
    ) -> torch.Tensor:
        """Return an empty tensor, by which autograd knows the order.

        Nothing is saved here: a call whose work runs before its experts then saves the same in the
        same order, as activation checkpointing needs it.
        """
        ctx.crossing = crossing
        # The graph's inputs are this function's, not the phase's.
        x_TD, weights_TK = x_TD.detach(), weights_TK.detach()
        with during(crossing.policy, "a forward pass"):
            phase = start_forward(crossing.policy, x_TD, weights_TK, parameters)
            phase.executor.run(leading(phase.schedule), phase)
        crossing.phase = phase
        return x_TD.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        _: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x and of the weights, once the last results are there."""
        return *ctx.crossing.end(), None, None


class CallersWork:
    """The work of one call, under the caller's autocast and the caller's modes.

    Args:
        x: the layer's input.
        modes: that do not see the layer.
    """

    def __init__(self, work: SharedWork, x: torch.Tensor, modes: HiddenModes) -> None:
        self._work, self._x, self._modes = work, x, modes
        kind = x.device.type
        self._autocast = torch.autocast(
            kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )  # fmt: skip
        self._result = torch.empty(0)

    def __call__(self) -> None:
        """Do the work.

        Raises:
            InputError: it changes the layer's input, whose later chunks have not left yet, or
                returns another shape.
        """
        x = self._x
        before = None if x.is_inference() else x._version  # noqa: SLF001 - as autograd does
        with self._modes.seeing(), self._autocast:
            self._result = self._work()
        if before is not None and x._version != before:  # noqa: SLF001
            raise InputError(
                "shared experts change their input in place while its rows travel to the experts",
                "let them compute on a copy",
            )
        if self._result.shape != x.shape:
            raise InputError(
                f"shared experts return {tuple(self._result.shape)} for tokens {tuple(x.shape)}",
                "they return what they are given, in shape",
            )

    def added_to(self, y: torch.Tensor) -> torch.Tensor:
        """Return the sum of the experts' outputs and the work's, in the dtype of those."""
        return y + self._result.to(y.dtype)
