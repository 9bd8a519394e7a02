"""The autograd function of every layer of experts, with the memory policy as an argument.

A token's way to the wire: `layer`, `gate`, **function**, `executor`, the policy's handlers
(`keep`, `reuse` for MPipeMoE's S1 to S4, `tensor` for PPMoE), `comm`. Here the policy makes a
phase's buffers and handlers, and the executor runs them. The backward pass has a schedule of its
own, because autograd's backward of chunked code does not overlap. Permutation, dispatch, experts
and combine are one function: with the permutation outside, rows would have to have the same order
backward as forward. Where other work, such as shared experts, runs behind its exchanges it is cut
in two.

T tokens, K choices, D model width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from moetune.domain.errors import InputError
from moetune.runtime.moe.dispatch import Dispatch
from moetune.runtime.moe.executor import PhaseInputs, PhaseRun, PipelineContext, leading
from moetune.runtime.plans.timers import Watch

Work = Callable[[], None]
"""Work that neither needs the experts' results nor exchanges anything with their ranks."""
SharedWork = Callable[[], torch.Tensor]
"""Gives what shared experts make of a layer's input, shaped as it."""
_NUM_PARAMETERS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPolicy:
    """The choice of buffers, saved tensors and transfers of a step.

    Args:
        context, dispatch: the part of the step that does not depend on the policy.
        forward, backward: make the buffers of a phase.
        release: gives borrowed memory back, after a backward pass or a failure.
    """

    context: PipelineContext
    dispatch: Dispatch
    forward: Callable[[PhaseInputs], PhaseRun]
    backward: Callable[[PhaseInputs], PhaseRun]
    release: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class StartedStep:
    """A step that all ranks agree on: its tokens (T, D), combine weights (T, K) and policy."""

    x_TD: torch.Tensor
    weights_TK: torch.Tensor
    policy: MemoryPolicy
    watch: Watch

    def run(
        self,
        work: Work | None,
        x_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        parameters: Sequence[Any],
    ) -> torch.Tensor:
        """Return Σₖ weightₖ · expertₖ(x) of this step's routing (T, D), timed.

        Args:
            work: runs behind the first dispatches, and its backward pass behind the last combine.
            parameters: as of `ExpertFunction`.
        """
        self.watch.begin()
        left, crossing = x_TD, None
        if work is not None:
            crossing = _Crossing(self.policy)
            left = _Leave.apply(x_TD, weights_TK, crossing, parameters)  # type: ignore[no-untyped-call]
            weights_TK = weights_TK.detach()  # whose gradient `_Leave` returns
            with _during(self.policy, "the work behind a dispatch"):
                work()
        y_TD: torch.Tensor = ExpertFunction.apply(  # type: ignore[no-untyped-call]
            left, weights_TK, self.policy, crossing, *parameters
        )
        self.watch.end_forward(y_TD)
        return y_TD


class _Crossing:
    """A call whose rows leave before other work runs: the state that both of its functions share.

    Attributes:
        phase: the forward phase, whose first dispatches are issued.
    """

    def __init__(self, policy: MemoryPolicy) -> None:
        self.policy = policy
        self.phase: PhaseRun | None = None
        self._grads: tuple[torch.Tensor, torch.Tensor] | None = None

    def take_phase(self) -> PhaseRun:
        """Return the forward phase, once."""
        assert self.phase is not None  # noqa: S101 - rows have left
        phase, self.phase = self.phase, None
        return phase

    def leave(self, phase: PhaseRun) -> None:
        """Keep a backward phase whose last results travel, with its buffers."""
        self.policy.context.workspace.hold(partial(self._end, phase))

    def end(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for the last results; return the gradients of x and of the weights."""
        self.policy.context.workspace.end_held()
        assert self._grads is not None  # noqa: S101 - `leave` comes before, in every backward pass
        grads, self._grads = self._grads, None
        return grads

    def _end(self, phase: PhaseRun) -> None:
        with self.policy.context.workspace.guard("a backward pass"):
            self._grads = phase.finish()


class ExpertFunction(torch.autograd.Function):
    """y = Σₖ weightₖ · expertₖ(x), in chunks whose transfers overlap computation."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context has no public type
        x_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        policy: MemoryPolicy,
        crossing: _Crossing | None,
        *parameters: Any,  # noqa: ANN401
    ) -> torch.Tensor:
        """Return (T, D).

        Parameters of another dtype than x are cast here, and again in the backward pass: their
        gradients are then never rounded to the dtype of the step, and no copy of them is kept.

        Args:
            x_TD: where rows have left already, what tells autograd the order.
            crossing: of rows that have left already.
            parameters: w1, b1, w2, b2 and w3 of the local experts, None where there is none.
        """
        # Not around this function: activation checkpointing ends a repeated pass by an exception
        # where its results are saved, and the buffers stay good.
        with _during(policy, "a forward pass"):
            if crossing is None:
                phase = _start_forward(policy, x_TD, weights_TK, parameters)
                phase.run(phase.schedule)
            else:
                phase = crossing.take_phase()
                phase.run(phase.schedule[len(leading(phase.schedule)) :])
            y_TD: torch.Tensor = phase.finish()
        ctx.policy, ctx.crossing = policy, crossing
        ctx.is_averaged = policy.context.gradients.is_due()
        if ctx.is_averaged:
            ctx.parameters = parameters  # a checkpoint would return copies of saved ones
        ctx.save_for_backward(weights_TK, *phase.saved, *parameters)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        grad_TD: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of x, the weights and the parameters.

        Where rows left before other work, the last results travel while that work's backward runs.
        """
        policy: MemoryPolicy = ctx.policy
        crossing: _Crossing | None = ctx.crossing
        with policy.context.workspace.guard("a backward pass"):
            try:
                phase = _run_backward(ctx, grad_TD)
                grads = phase.finish() if crossing is None else (grad_TD.new_empty(0), None)
            finally:
                policy.release()
            if crossing is not None:
                crossing.leave(phase)
            if ctx.is_averaged:
                policy.context.gradients.average(ctx.parameters)
            parameter_grads = phase.grads.totals()
        if crossing is not None and not ctx.needs_input_grad[0]:  # nobody asks for the rest
            crossing.end()
        return *grads, None, None, *parameter_grads


def _start_forward(
    policy: MemoryPolicy, x_TD: torch.Tensor, weights_TK: torch.Tensor, parameters: Sequence[Any]
) -> PhaseRun:
    """Return a forward phase whose buffers are made."""
    phase = policy.forward(
        PhaseInputs(
            context=policy.context, dispatch=policy.dispatch, values_TD=x_TD,
            weights_TK=weights_TK, experts=policy.context.weights(parameters, x_TD.dtype),
        )
    )  # fmt: skip
    phase.begin()
    return phase


@contextmanager
def _during(policy: MemoryPolicy, phase: str) -> Iterator[None]:
    """Run a forward phase, or a part of one; where it fails, its memory is given back."""
    with policy.context.workspace.guard(phase):
        try:
            yield
        except BaseException:
            policy.release()
            raise


def _run_backward(
    ctx: Any,  # noqa: ANN401
    grad_TD: torch.Tensor,
) -> PhaseRun:
    """Return a backward phase whose steps are issued; its last results may still travel."""
    policy: MemoryPolicy = ctx.policy
    weights_TK, *saved = ctx.saved_tensors
    parameters = [saved.pop() for _ in range(_NUM_PARAMETERS)][::-1]
    dtypes = [
        each.dtype if is_needed else None
        for each, is_needed in zip(parameters, ctx.needs_input_grad[-_NUM_PARAMETERS:], strict=True)
    ]
    inputs = PhaseInputs(
        context=policy.context, dispatch=policy.dispatch,
        values_TD=grad_TD, weights_TK=weights_TK, saved=tuple(saved),
        experts=policy.context.weights(parameters, grad_TD.dtype),
        grad_dtypes=dtypes,
    )  # fmt: skip
    phase = policy.backward(inputs)
    phase.begin()
    phase.run(phase.schedule)
    phase.grads.finish()  # while the last results travel
    return phase


class _Leave(torch.autograd.Function):
    """Sends the rows of the first chunks."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context has no public type
        x_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        crossing: _Crossing,
        parameters: Sequence[Any],
    ) -> torch.Tensor:
        """Return an empty tensor, by which autograd knows the order.

        Nothing is saved here: a call whose work runs before its experts then saves the same in the
        same order, as activation checkpointing needs it.
        """
        ctx.crossing = crossing
        # The graph's inputs are this function's, not the phase's.
        x_TD, weights_TK = x_TD.detach(), weights_TK.detach()
        with _during(crossing.policy, "a forward pass"):
            phase = _start_forward(crossing.policy, x_TD, weights_TK, parameters)
            phase.run(leading(phase.schedule))
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
    """The work of one call, under the caller's autocast.

    Args:
        x: the layer's input.

    Attributes:
        result: of the work, once it is done.
    """

    result: torch.Tensor

    def __init__(self, work: SharedWork, x: torch.Tensor) -> None:
        self._work, self._x = work, x
        kind = x.device.type
        self._autocast = torch.autocast(
            kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )  # fmt: skip

    def __call__(self) -> None:
        """Do the work.

        Raises:
            InputError: it changes the layer's input, whose later chunks have not left yet, or
                returns another shape.
        """
        x = self._x
        before = None if x.is_inference() else x._version  # noqa: SLF001 - as autograd does
        with self._autocast:
            self.result = checked_output(self._work, x)
        if before is not None and x._version != before:  # noqa: SLF001
            raise InputError(
                "shared experts change their input in place while its rows travel to the experts",
                "let them compute on a copy",
            )


def checked_output(work: SharedWork, x: torch.Tensor) -> torch.Tensor:
    """Return what shared experts make of a layer's input.

    Raises:
        InputError: it is not shaped as the input.
    """
    result = work()
    if result.shape != x.shape:
        raise InputError(
            f"shared experts return {tuple(result.shape)} for tokens {tuple(x.shape)}",
            "they return what they are given, in shape",
        )
    return result
